"""The ledger of references in Redis: its scripts, its clients, rebuild, reaping, and what checks it."""
