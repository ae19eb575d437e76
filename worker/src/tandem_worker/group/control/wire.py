"""What rank 0 sends the others, as bytes: a step, what draft heads are told, copies to host memory and back.

Everything is int32, counts first."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from tandem_worker.engine.execute.batch import StepInput
from tandem_worker.engine.schedule.host_cache import Moves

_FIELDS = ("copies", "token_ids", "rows", "query_lens", "context_lens", "logits_rows", "table_runs", "table_values")
_COLUMNS = {"copies": 2, "table_runs": 3}


def encode_step(step: StepInput) -> bytes:
    """All arrays of the step one after another, behind their lengths."""
    arrays = [getattr(step, name).reshape(-1) for name in _FIELDS]
    counts = [step.num_decodes, *(array.size for array in arrays)]
    return np.concatenate([counts, *arrays]).astype(np.int32).tobytes()


def decode_step(data: bytes) -> StepInput:
    """Raises ValueError when `data` is not what `encode_step` makes."""
    numbers = np.frombuffer(data, dtype=np.int32).astype(np.int64)
    num_decodes, counts, rest = numbers[:1], numbers[1 : len(_FIELDS) + 1], numbers[len(_FIELDS) + 1 :]
    if len(counts) < len(_FIELDS) or counts.sum() != rest.size:
        raise ValueError(f"a step of {rest.size} numbers does not have the announced {counts.tolist()}")
    pieces = np.split(rest, np.cumsum(counts)[:-1])
    arrays = {name: piece.reshape(-1, _COLUMNS[name]) if name in _COLUMNS else piece
              for name, piece in zip(_FIELDS, pieces, strict=True)}  # fmt: skip
    return StepInput(**arrays, num_decodes=int(num_decodes[0]))


class HeadCall(IntEnum):
    """What the ranks of a group are told about their draft head, in its place among the steps."""

    BEGIN = 1
    """Chains begin: how deep they may go; then of each the newest token, its position and its blocks."""
    COMPUTE = 2
    """The next guess of these chains, behind what was guessed before."""
    KEEP = 3
    """Tokens of these rows stay, in these blocks."""


class HeadOrder(NamedTuple):
    """A call and its lists of numbers."""

    call: HeadCall
    lists: tuple[list[int], ...]


def encode_head_order(call: HeadCall, *lists: Sequence[int]) -> bytes:
    """The lists one after another, behind the call, their number and their lengths."""
    numbers = [int(call), len(lists), *map(len, lists)]
    return np.concatenate([numbers, *(np.asarray(each, dtype=np.int64) for each in lists)]).astype(np.int32).tobytes()


def decode_head_order(data: bytes) -> HeadOrder:
    """Raises ValueError when `data` is not what `encode_head_order` makes."""
    numbers = np.frombuffer(data, dtype=np.int32)
    count = int(numbers[1]) if numbers.size > 1 else -1
    lengths, rest = numbers[2 : 2 + max(0, count)], numbers[2 + max(0, count) :]
    if count < 0 or len(lengths) != count or (lengths < 0).any() or lengths.sum() != rest.size:
        raise ValueError(f"{numbers.size} numbers are no order about a draft head")
    pieces = np.split(rest, np.cumsum(lengths)[:-1]) if count else []
    return HeadOrder(HeadCall(int(numbers[0])), tuple(piece.tolist() for piece in pieces))


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
