"""The step loop: batches requests, runs the model, samples, delivers tokens."""
