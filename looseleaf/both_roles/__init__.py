"""A worker process that runs prefill and decode side by side, with one copy of the model."""
