"""The policy that decides whether a request is admitted (queue, predicted wait, limits of tenants) and when it
starts.
"""
