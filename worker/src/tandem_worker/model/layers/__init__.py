"""Layers that model families share."""
