"""Runs functions on hostile input in processes of their own, with limits and a deadline. Knows nothing of models."""
