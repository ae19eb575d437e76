"""Prefill and decode workers apart, decode workers that convert, and workers that do both, on the same requests."""
