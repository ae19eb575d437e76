"""Which revision, image and pods workers have now, and which are replaced."""
