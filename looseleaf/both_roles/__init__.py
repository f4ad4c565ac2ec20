"""A worker's process that hosts prefill and decode beside each other, on one model and one device."""
