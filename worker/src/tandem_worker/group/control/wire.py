"""A step, and copies to host memory and back, as bytes: what rank 0 sends the others. Everything is int32."""

from __future__ import annotations

import numpy as np

from tandem_worker.engine.execute.batch import StepInput
from tandem_worker.engine.schedule.host_cache import Moves

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


def encode_moves(moves: Moves, *, settle: bool) -> bytes:
    """Copies, and whether they are to be made before anything else happens."""
    pairs = np.array([*moves.out, *moves.into], dtype=np.int32).reshape(-1)
    return np.concatenate([[settle, len(moves.out)], pairs]).astype(np.int32).tobytes()


def decode_moves(data: bytes) -> tuple[Moves, bool]:
    """Raises ValueError when `data` is not what `encode_moves` makes."""
    numbers = np.frombuffer(data, dtype=np.int32)
    if len(numbers) < 2 or len(numbers) % 2 or not 0 <= numbers[1] <= len(numbers) // 2 - 1:
        raise ValueError(f"{len(numbers)} numbers are no copies between blocks")
    pairs = [(int(first), int(second)) for first, second in numbers[2:].reshape(-1, 2)]
    return Moves(out=tuple(pairs[: numbers[1]]), into=tuple(pairs[numbers[1] :])), bool(numbers[0])
