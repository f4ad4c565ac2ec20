"""Code that prefill and decode workers share: the step thread, turns between processes, a role's life cycle."""
