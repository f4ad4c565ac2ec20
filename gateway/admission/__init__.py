"""Decides which request starts when: tenants' shares, the queue, the predicted wait."""
