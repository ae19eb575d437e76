"""How key-value blocks move from prefill to decode workers: a contract (`contract`) and its TCP implementation."""
