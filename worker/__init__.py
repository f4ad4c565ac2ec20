"""Code that prefill and decode workers share: the step thread, turns between processes, and the life cycle
of a role.
"""
