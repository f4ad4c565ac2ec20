"""The ledger of references in Redis: its scripts and clients, rebuild, reaping, and checks."""
