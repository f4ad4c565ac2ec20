"""What a prefill worker and a decode worker share: the step thread, turns between processes, the lifecycle of a
role.
"""
