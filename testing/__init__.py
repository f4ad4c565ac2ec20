"""What tests and fault injection are built of: oracles, models of the ledger, faulty workers. Not installed."""
