"""Structured output: JSON schemas and grammars as masks over the next token."""
