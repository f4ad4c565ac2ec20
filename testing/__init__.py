"""Code for tests and fault injection: oracles, models of the ledger, and faulty workers. Not installed with the
product.
"""
