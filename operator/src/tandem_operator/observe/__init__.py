"""What is there of a model, in replicas, and why it is not up. Pure."""
