"""Code for `make fuzz`, which sends mostly invalid input to the HTTP and gRPC ports of a running system."""
