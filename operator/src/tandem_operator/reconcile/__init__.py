"""One look at one model: the steps of it, their execution, and what is told."""
