"""What an embedding model makes of a prompt. Imports no torch: the engine's schedule carries it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Pooling(StrEnum):
    """How one vector is made of a prompt's hidden states: the last one, their mean, or the first one."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """What an embedding model makes of a text: `size` numbers, of length 1 if it normalizes."""

    pooling: Pooling
    normalize: bool
    size: int
