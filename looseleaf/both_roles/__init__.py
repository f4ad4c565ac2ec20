"""A worker process that runs prefill and decode side by side, on one model and one device."""
