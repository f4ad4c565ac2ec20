"""Tests of a real system with random JSON schemas. Some tests kill decode workers or make groups be swapped out."""
