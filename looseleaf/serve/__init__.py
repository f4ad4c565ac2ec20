"""`looseleaf serve`: every service on one machine, started, watched and replaced."""
