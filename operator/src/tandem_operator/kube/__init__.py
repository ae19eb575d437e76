"""The edge to the API server: a client, a cache of the operator's children, and what keeps the cache fresh."""
