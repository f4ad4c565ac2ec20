"""Code for tests and fault injection: oracles, models of the ledger, faulty workers. Not installed."""
