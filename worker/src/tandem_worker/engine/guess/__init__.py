"""Guesses what choices say next, so that a step can check several tokens of each. Knows no torch."""
