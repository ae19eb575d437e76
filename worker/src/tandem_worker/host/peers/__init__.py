"""Connections between the processes of one model: who may speak at all, before anything else is said."""
