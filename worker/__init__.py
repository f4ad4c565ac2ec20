"""Code that prefill and decode workers share, such as the step thread, the locks for taking turns on the cores, and the
life cycle of a role.
"""
