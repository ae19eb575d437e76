"""The APIs that requests and answers are written in."""
