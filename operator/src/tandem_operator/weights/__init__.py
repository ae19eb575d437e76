"""Which weights workers load, and the cache that is filled before they start."""
