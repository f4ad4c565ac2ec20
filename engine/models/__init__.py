"""The native model definitions: one decoder for all families except OPT, and one for OPT."""
