"""Model definitions: one decoder for the Llama-like families, one for OPT."""
