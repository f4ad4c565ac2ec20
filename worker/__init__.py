"""What a prefill worker and a decode worker share: the step thread, turns between processes, the life of a role."""
