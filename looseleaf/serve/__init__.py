"""`looseleaf serve`: starts every service on one machine, watches them and replaces those that end."""
