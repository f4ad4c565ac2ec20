"""The ledger of references in Redis, with its scripts, clients, rebuild, sweep and checks."""
