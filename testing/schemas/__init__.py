"""Random JSON schemas against a real system, also while decode workers are killed and while groups are swapped out."""
