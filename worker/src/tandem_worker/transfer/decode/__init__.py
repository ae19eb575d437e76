"""The decode end of a KV transfer: orders blocks and receives them."""
