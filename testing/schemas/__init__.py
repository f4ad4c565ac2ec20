"""Tests of random JSON schemas with a real system, also while decode workers are killed or groups are swapped out."""
