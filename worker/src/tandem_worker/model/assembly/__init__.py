"""Puts layers together from a checkpoint: what model families are written with."""
