"""Decides when a request starts, by its tenant's share, the queue and the predicted wait."""
