"""`make fuzz`: input that nobody should send, to every port of a running system."""
