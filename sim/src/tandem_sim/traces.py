"""What is replayed: requests with a time, a length and the blocks of their prompts.

A trace in the format of Mooncake's (one JSON object per line: `timestamp` in ms, `input_length`, `output_length`,
`hash_ids`, one per 512 tokens; equal leading ids are a shared prefix), or one in the format of Azure's (CSV with
`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`). `read` tells them apart by their first line.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

BLOCK_TOKENS = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")
_MOONCAKE_LINE = '{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}'
_AZURE_LINE = "2023-11-16 18:15:46.680590,374,44"
_ROUNDINGS = (3000, 1000)
"""Milliseconds to which traces are known to be rounded."""


class TraceError(ValueError):
    """A trace that cannot be read: the file, the line, what was wrong and what to write."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    """Seconds."""
    prompt: int
    output: int
    """Tokens."""
    blocks: tuple[int, ...]
    """One id per full block; equal ids have equal prefixes."""
    session: int


def read(path: Path) -> list[Arrival]:
    """A trace in either format. Arrivals that were rounded to seconds are spread over what they were rounded to.

    Raises TraceError where it cannot be read.
    """
    first = next(_read_lines(path), None)
    if first is None:
        raise TraceError(f"{path} has no line: write one request per line, for example {_MOONCAKE_LINE}")
    if first[1].lstrip().startswith("{"):
        arrivals = read_trace(path)
        return spread(arrivals, rounded / 1000) if (rounded := find_rounding(arrivals)) else arrivals
    if _read_header(first[1]):
        return read_azure(path)
    raise TraceError(
        f"{path}, line 1: neither a JSON object as in Mooncake's traces ({_MOONCAKE_LINE}) nor the header of Azure's "
        f"({','.join(AZURE_COLUMNS)}): {_shorten(first[1])}"
    )


def read_trace(path: Path) -> list[Arrival]:
    """Requests of a trace in Mooncake's format, by time. A conversation is what shares more than its first block."""
    arrivals: list[Arrival] = []
    for number, line in _read_lines(path):
        where = f"{path}, line {number}"
        try:
            row = cast("object", json.loads(line))
        except ValueError as error:
            raise TraceError(f"{where}: no JSON ({error}); write {_MOONCAKE_LINE}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{where}: {_shorten(line)} is no JSON object; write {_MOONCAKE_LINE}")
        fields = cast("dict[str, object]", row)
        at, prompt, output = (_read_field(fields, name, where) for name in MOONCAKE_FIELDS)
        ids = _read_ids(fields, where)
        _check(at, prompt, output, where, MOONCAKE_FIELDS)
        session = ids[min(1, len(ids) - 1)] if ids else number
        arrivals.append(
            Arrival(at / 1000, int(prompt), int(output), tuple(ids[: int(prompt) // BLOCK_TOKENS]), session)
        )
    return sorted(arrivals, key=lambda arrival: arrival.at)


def read_azure(path: Path) -> list[Arrival]:
    """Requests of a trace of the Azure LLM inference dataset, which tells no prefixes, by time."""
    arrivals: list[Arrival] = []
    first: float | None = None
    columns: list[int] = []
    for number, line in _read_lines(path):
        where = f"{path}, line {number}"
        if not columns:
            columns = _read_header(line)
            if not columns:
                raise TraceError(f"{where}: {_shorten(line)} is no header; write {','.join(AZURE_COLUMNS)}")
            continue
        cells = next(csv.reader([line]))
        if len(cells) <= max(columns):
            raise TraceError(
                f"{where}: {len(cells)} columns where the header names {max(columns) + 1}; write {_AZURE_LINE}"
            )
        moment, *counts = (cells[index].strip() for index in columns)
        at = _read_moment(moment, where)
        first = at if first is None else first
        prompt, output = (_read_number(cell, name, where) for cell, name in zip(counts, AZURE_COLUMNS[1:], strict=True))
        _check(at - first, prompt, output, where, AZURE_COLUMNS, earlier=True)
        arrivals.append(Arrival(at - first, int(prompt), int(output), (), number - 2))
    if not arrivals:
        raise TraceError(f"{path} has a header and no requests: write a line for each, for example {_AZURE_LINE}")
    arrivals.sort(key=lambda arrival: arrival.at)
    begin = arrivals[0].at
    return [replace(arrival, at=arrival.at - begin) for arrival in arrivals] if begin < 0 else arrivals


def find_rounding(arrivals: Sequence[Arrival]) -> int:
    """Milliseconds to which the arrivals are rounded, give or take one; 0 where they are not."""
    for width in _ROUNDINGS:
        off = sum(2 <= round(arrival.at * 1000) % width <= width - 2 for arrival in arrivals)
        if off <= 0.01 * len(arrivals):
            return width
    return 0


def spread(arrivals: list[Arrival], seconds: float, seed: int = 1) -> list[Arrival]:
    """Arrivals at random moments of the interval to which they were rounded.

    Mooncake's timestamps are multiples of 3 s: as they stand, ten requests would come at once and then none.
    """
    chance = random.Random(seed)
    moved = [
        replace(arrival, at=round(arrival.at / seconds) * seconds + chance.random() * seconds) for arrival in arrivals
    ]
    return sorted(moved, key=lambda arrival: arrival.at)


def multiply(arrivals: list[Arrival], copies: int, speed: float) -> list[Arrival]:
    """As many independent copies, each begun elsewhere in the recording, at `speed` times its pace."""
    span = arrivals[-1].at + 1
    width = 1 + max(max(arrival.blocks, default=0) for arrival in arrivals)
    sessions = 1 + max(arrival.session for arrival in arrivals)
    spread = [
        Arrival(
            ((arrival.at + span * copy / copies) % span) / speed,
            arrival.prompt,
            arrival.output,
            arrival.blocks if not copy else tuple([block + copy * width for block in arrival.blocks]),
            arrival.session + copy * sessions,
        )
        for copy in range(copies)
        for arrival in arrivals
    ]
    return sorted(spread, key=lambda arrival: arrival.at)


def offered_tokens(arrivals: Iterable[Arrival]) -> float:
    """Prompt tokens per second."""
    listed = list(arrivals)
    return sum(arrival.prompt for arrival in listed) / max(1e-9, listed[-1].at - listed[0].at)


# reading


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers from 1 on."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no text in UTF-8 ({error.reason}): unpack it, if it is packed") from error


def _read_header(line: str) -> list[int]:
    """Find Azure's columns; empty where one is missing."""
    names = [name.strip() for name in next(csv.reader([line]))]
    return [names.index(name) for name in AZURE_COLUMNS] if set(AZURE_COLUMNS) <= set(names) else []


def _read_field(row: dict[str, object], name: str, where: str) -> float:
    if name not in row:
        raise TraceError(f"{where}: {name} is missing; write {_MOONCAKE_LINE}")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TraceError(f"{where}: {name} is {_shorten(json.dumps(value))}; write a number, as in {_MOONCAKE_LINE}")
    return float(value)


def _read_ids(row: dict[str, object], where: str) -> list[int]:
    """Ids of blocks; a request without any shares nothing."""
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in cast("list[object]", ids)):
        raise TraceError(f"{where}: hash_ids is {_shorten(json.dumps(ids))}; write a list of whole numbers")
    return cast("list[int]", ids)


def _read_number(cell: str, name: str, where: str) -> float:
    try:
        return float(cell)
    except ValueError as error:
        raise TraceError(
            f"{where}: {name} is {_shorten(cell)!r}; write a number of tokens, as in {_AZURE_LINE}"
        ) from error


def _read_moment(text: str, where: str) -> float:
    """Seconds since 1970. Azure's traces have seven digits after the second, or an offset from UTC."""
    clock, dot, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(clock + (f".{digits[:6]:0<6}" if dot else "") + rest[len(digits) :])
    except ValueError as error:
        raise TraceError(f"{where}: TIMESTAMP is {_shorten(text)!r}; write a moment as in {_AZURE_LINE}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _check(
    at: float, prompt: float, output: float, where: str, names: Sequence[str], *, earlier: bool = False
) -> None:  # fmt: skip
    if not earlier and not 0 <= at < float("inf"):
        raise TraceError(f"{where}: {names[0]} is {at:g}; write milliseconds since the beginning, from 0 on")
    for name, count in zip(names[1:], (prompt, output), strict=True):
        if not 1 <= count <= 1e8:
            raise TraceError(f"{where}: {name} is {count:g}; write a number of tokens, at least 1")


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
