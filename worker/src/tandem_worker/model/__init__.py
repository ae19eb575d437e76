"""The model: from a checkpoint to a function from one batch to logits; `load` is the way in."""
