"""The engine against transformers, and the cost of its control logic."""
