"""The memory-bound half of Looseleaf: takes over block tables and produces tokens."""
