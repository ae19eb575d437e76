"""Rollouts of every kind under load, and a table of what clients saw: `make soak-rollouts`."""
