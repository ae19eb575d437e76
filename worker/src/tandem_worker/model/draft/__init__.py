"""Draft heads: what a published EAGLE-3 checkpoint computes beside the model it belongs to."""
