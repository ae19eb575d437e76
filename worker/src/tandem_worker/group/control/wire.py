"""A step as bytes: what rank 0 sends the others. Everything is int32; counts come first."""

from __future__ import annotations

import numpy as np

from tandem_worker.engine.execute.batch import StepInput

_FIELDS = ("copies", "token_ids", "rows", "query_lens", "context_lens", "logits_rows", "table_runs", "table_values")
_COLUMNS = {"copies": 2, "table_runs": 3}


def encode_step(step: StepInput) -> bytes:
    """All arrays of the step one after another, behind their lengths."""
    arrays = [getattr(step, name).reshape(-1) for name in _FIELDS]
    return np.concatenate([[array.size for array in arrays], *arrays]).astype(np.int32).tobytes()


def decode_step(data: bytes) -> StepInput:
    """Raises ValueError when `data` is not what `encode_step` makes."""
    numbers = np.frombuffer(data, dtype=np.int32).astype(np.int64)
    counts, rest = numbers[: len(_FIELDS)], numbers[len(_FIELDS) :]
    if len(counts) < len(_FIELDS) or counts.sum() != rest.size:
        raise ValueError(f"a step of {rest.size} numbers does not have the announced {counts.tolist()}")
    pieces = np.split(rest, np.cumsum(counts)[:-1])
    arrays = {name: piece.reshape(-1, _COLUMNS[name]) if name in _COLUMNS else piece
              for name, piece in zip(_FIELDS, pieces, strict=True)}  # fmt: skip
    return StepInput(**arrays)
