"""The life of one inference request: choose workers, send, pass on, and what follows when that fails."""
