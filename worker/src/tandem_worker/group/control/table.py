"""The table in which the ranks of a group find each other: keys and bytes, kept by rank 0.

What `torch.distributed` wants of a store, over connections that have proven their key, instead of a port of torch's own
that anybody may connect to. Bounded, because a rank with a defect must not fill its leader.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

_HEAD = struct.Struct("!IB")
_LENGTH = struct.Struct("!I")


class Operation(IntEnum):
    """What is done, with which fields. `GET` and `WAIT` are answered when every key is there."""

    SET = 1
    """Key, value. Answer: nothing."""
    GET = 2
    """Key. Answer: its value."""
    WAIT = 3
    """Keys. Answer: nothing."""
    CHECK = 4
    """Keys. Answer: `1` when all are there, else `0`."""
    ADD = 5
    """Key, decimal number. Answer: the sum, decimal; a key that is not there counts 0."""
    COMPARE_SET = 6
    """Key, expected, desired. Answer: what the key has now. Nothing is expected of a key that is not there."""
    DELETE = 7
    """Key. Answer: `1` when it was there, else `0`."""
    COUNT = 8
    """Answer: how many keys there are, decimal."""
    APPEND = 9
    """Key, value. Answer: nothing."""


_FIELDS = {
    Operation.SET: 2, Operation.GET: 1, Operation.ADD: 2, Operation.COMPARE_SET: 3, Operation.DELETE: 1,
    Operation.COUNT: 0, Operation.APPEND: 2,
}  # fmt: skip
"""How many, where that is fixed."""

Done = Callable[[bytes | None], None]
"""Gets the answer, or None when the table is closed before there is one. Called on whatever thread caused it."""


class TableError(ValueError):
    """The operation is not one, or there is no room for it."""


@dataclass(slots=True, eq=False)
class _Waiting:
    missing: set[bytes]
    wanted: bytes | None
    """The key whose value is the answer; None where the answer is nothing."""
    done: Done


class Table:
    """Any thread."""

    def __init__(self, *, max_bytes: int = 64 << 20, max_keys: int = 1 << 16, max_waiting: int = 4096) -> None:
        self._max_bytes, self._max_keys, self._max_waiting = max_bytes, max_keys, max_waiting
        self._lock = threading.Lock()
        self._values: dict[bytes, bytes] = {}
        self._num_bytes = 0
        self._waiting: dict[bytes, list[_Waiting]] = {}
        self._num_waiting = 0
        self._closed = False

    def execute(self, operation: Operation, fields: Sequence[bytes], done: Done) -> None:
        """Raises TableError; nothing has changed then."""
        if len(fields) != _FIELDS.get(operation, len(fields)):
            raise TableError(f"{operation.name} takes {_FIELDS[operation]} fields, not {len(fields)}")
        if operation in {Operation.GET, Operation.WAIT}:
            self._when_present(_Waiting(set(fields), fields[0] if operation is Operation.GET else None, done))
            return
        with self._lock:
            answer = self._change(operation, fields)
            ready = self._take_ready(fields[0]) if fields and fields[0] in self._values else []
            answers = [self._answer(waiting) for waiting in ready]
        done(answer)  # outside the lock: it may send
        for waiting, theirs in zip(ready, answers, strict=True):
            waiting.done(theirs)

    def close(self) -> None:
        """Whoever waits is told that there is no answer, and so is whoever asks later."""
        with self._lock:
            self._closed = True
            left = {id(waiting): waiting for entries in self._waiting.values() for waiting in entries}
            self._waiting.clear()
            self._num_waiting = 0
        for waiting in left.values():
            waiting.done(None)

    def _change(self, operation: Operation, fields: Sequence[bytes]) -> bytes:
        """Everything that needs no waiting."""
        if operation is Operation.CHECK:
            return b"%d" % all(key in self._values for key in fields)
        if operation is Operation.COUNT:
            return b"%d" % len(self._values)
        key = fields[0]
        known = self._values.get(key)
        if operation is Operation.SET:
            self._put(key, fields[1])
        elif operation is Operation.APPEND:
            self._put(key, (known or b"") + fields[1])
        elif operation is Operation.ADD:
            total = b"%d" % (_parse_number(known or b"0") + _parse_number(fields[1]))
            self._put(key, total)
            return total
        elif operation is Operation.COMPARE_SET:
            if (known or b"") == fields[1]:
                self._put(key, fields[2])
                return fields[2]
            return fields[1] if known is None else known
        else:
            assert operation is Operation.DELETE
            if known is None:
                return b"0"
            del self._values[key]
            self._num_bytes -= len(key) + len(known)
            return b"1"
        return b""

    def _put(self, key: bytes, value: bytes) -> None:
        known = self._values.get(key)
        grown = self._num_bytes + len(value) + (len(key) if known is None else -len(known))
        if grown > self._max_bytes or (known is None and len(self._values) >= self._max_keys):
            raise TableError(f"the group's table is full: {len(self._values)} keys, {self._num_bytes} bytes")
        self._values[key], self._num_bytes = value, grown

    def _when_present(self, waiting: _Waiting) -> None:
        with self._lock:
            waiting.missing = {key for key in waiting.missing if key not in self._values}
            if waiting.missing and not self._closed:
                if self._num_waiting + len(waiting.missing) > self._max_waiting:
                    raise TableError(f"{self._num_waiting} keys of the group's table are waited for already")
                self._num_waiting += len(waiting.missing)
                for key in waiting.missing:
                    self._waiting.setdefault(key, []).append(waiting)
                return
            answer = None if self._closed else self._answer(waiting)
        waiting.done(answer)

    def _answer(self, waiting: _Waiting) -> bytes:
        return b"" if waiting.wanted is None else self._values[waiting.wanted]

    def _take_ready(self, key: bytes) -> list[_Waiting]:
        """Those who waited for `key` and need nothing else."""
        entries = self._waiting.pop(key, [])
        self._num_waiting -= len(entries)
        for waiting in entries:
            waiting.missing.discard(key)
        return [waiting for waiting in entries if not waiting.missing]


def _parse_number(text: bytes) -> int:
    try:
        return int(text[:20])
    except ValueError as error:
        raise TableError("only numbers can be added") from error


def encode_call(number: int, operation: Operation, fields: Sequence[bytes]) -> bytes:
    """`number` comes back with the answer."""
    return b"".join([_HEAD.pack(number, operation), *(_LENGTH.pack(len(field)) + field for field in fields)])


def decode_call(payload: bytes) -> tuple[int, Operation, list[bytes]]:
    """Raises TableError when `payload` is not what `encode_call` makes."""
    if len(payload) < _HEAD.size:
        raise TableError("an operation on the group's table is cut off")
    number, operation = _HEAD.unpack_from(payload)
    fields, place = [], _HEAD.size
    while place < len(payload):
        if place + _LENGTH.size > len(payload):
            raise TableError("an operation on the group's table is cut off")
        (length,) = _LENGTH.unpack_from(payload, place)
        place += _LENGTH.size
        if place + length > len(payload):
            raise TableError("an operation on the group's table is cut off")
        fields.append(payload[place : place + length])
        place += length
    try:
        return number, Operation(operation), fields
    except ValueError as error:
        raise TableError(f"there is no operation {operation} on the group's table") from error


def encode_result(number: int, answer: bytes) -> bytes:
    """`answer` to the call that `encode_call` gave this number."""
    return _LENGTH.pack(number) + answer


def decode_result(payload: bytes) -> tuple[int, bytes]:
    """Raises TableError."""
    if len(payload) < _LENGTH.size:
        raise TableError("an answer of the group's table is cut off")
    return _LENGTH.unpack_from(payload)[0], payload[_LENGTH.size :]
