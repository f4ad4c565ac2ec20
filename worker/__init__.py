"""Code that prefill and decode workers share: the step thread, turns between processes, the life cycle of a role."""
