"""How key-value blocks move from prefill to decode workers: a contract (`base`) and its TCP implementation."""
