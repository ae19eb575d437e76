"""Links to workers. `base` is the contract, `http1` the plain HTTP/1.1 link; others can stand beside it."""
