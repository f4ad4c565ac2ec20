"""Decides whether a request is admitted, by the queue, the predicted wait and the limits of tenants, and when the
request starts.
"""
