"""Tests of a real system with random JSON schemas. Some tests kill decode workers or force groups to be swapped out."""
