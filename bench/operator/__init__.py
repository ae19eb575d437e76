"""The operator with a thousand pods on a real API server."""
