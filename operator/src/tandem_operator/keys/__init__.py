"""The keys of a model's pods: when they rotate, and the Secret that holds them."""
