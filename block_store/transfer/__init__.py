"""Transfer of blocks between hosts: the sending side, the receiving side, and the transports between them."""
