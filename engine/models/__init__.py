"""The native model definitions. There is one decoder for all families except OPT, and one for OPT."""
