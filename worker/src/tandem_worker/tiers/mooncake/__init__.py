"""Mooncake's store as a tier: a client of the node's `mooncake_client`, in a process of its own."""
