"""Attention by torch operations, for any device and element type."""
