"""Choosing the next token, on the host or on the device, and pooling of embeddings."""
