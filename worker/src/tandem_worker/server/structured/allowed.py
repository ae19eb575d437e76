"""`allowed_token_ids`: a grammar of one state, in which these tokens and no others may follow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tandem_worker.engine.errors import RequestError


class AllowedTokens:
    """Both the factory and the grammar of every choice: there is no state. Never ends an answer by itself."""

    __slots__ = ("_row",)
    seconds = 0.0
    terminated = False
    failed = False

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        allowed = np.zeros((vocab_size + 31) // 32 * 32, dtype=np.uint8)
        allowed[list(token_ids)] = 1
        self._row = np.packbits(allowed, bitorder="little").view(np.int32)

    def new(self) -> AllowedTokens:
        return self

    def fill_mask(self, mask: Any) -> None:
        """`mask`: one contiguous row of int32 words; words beyond the vocabulary become 0."""
        row = np.asarray(mask).reshape(-1)
        row[: len(self._row)] = self._row
        row[len(self._row) :] = 0

    def accept(self, token_id: int) -> None:
        """Every token of the mask leaves things as they are."""

    def give_up(self, reason: RequestError) -> None:
        """It costs nothing that others could want back."""
