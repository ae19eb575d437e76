"""What a request is answered with where it does not say: the API's own values, or those that a model brings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Stands below every request. Its own values are the API's, which turn everything off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0


API_DEFAULTS = SamplingDefaults()
LIMITS = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.01, 10.0)}
"""Lowest and highest value of each, in requests as in a model's settings."""
