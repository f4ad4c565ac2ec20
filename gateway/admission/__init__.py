"""Decides whether a request is admitted, by the queue, predicted wait and tenant limits, and when it starts."""
