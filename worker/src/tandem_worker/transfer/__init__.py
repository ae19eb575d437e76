"""KV blocks between workers: prefill workers push, decode workers receive."""
