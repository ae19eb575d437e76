"""One worker out of several processes: who they are, how they meet, what rank 0 tells the others, how they end."""
