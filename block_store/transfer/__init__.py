"""Transfers blocks between hosts. Contains the sending side, the receiving side, and the transports between them."""
