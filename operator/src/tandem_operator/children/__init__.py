"""What a model should have against what is there: what is kept, written and deleted."""
