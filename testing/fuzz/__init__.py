"""`make fuzz`: sends invalid input to every port of a running system."""
