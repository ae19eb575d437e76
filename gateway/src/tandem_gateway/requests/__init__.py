"""What clients ask, read as far as routing needs it; and what is answered without a worker."""
