"""The prefill end of a KV transfer: sends finished blocks."""
