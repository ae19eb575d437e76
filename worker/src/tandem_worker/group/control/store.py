"""`torch.distributed`'s store over the group's control channel: see `group.control.table`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from tandem_worker.group.control.table import Operation

_SECONDS = 300.0


class Call(Protocol):
    """An operation on the group's table. Raises TimeoutError, GroupLostError."""

    def __call__(self, operation: Operation, fields: Sequence[bytes], *, seconds: float) -> bytes: ...


class GroupStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """Torch calls these methods, also from threads of its own: gloo to exchange addresses, NCCL its identifiers.

    Torch's C++ half does not keep this object alive: whoever makes it has to, as long as its groups are used.
    """

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def set(self, key: str, value: bytes | str) -> None:
        """Store `value` under `key`, in place of what was there. Raises what `Call` raises, as all methods do."""
        self._ask(Operation.SET, key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`; waits up to 300 seconds for somebody to set it."""
        return self._ask(Operation.GET, key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all of `keys` are there. Raises TimeoutError after `timeout`, which is 300 seconds where not
        given."""
        fields = [key.encode() for key in keys]
        self._call(Operation.WAIT, fields, seconds=_SECONDS if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Whether all of `keys` are there now. Does not wait for them."""
        return self._call(Operation.CHECK, [key.encode() for key in keys], seconds=_SECONDS) == b"1"

    def add(self, key: str, value: int) -> int:
        """Add `value` to the number under `key`, where a key that is not there counts as 0. Returns the sum."""
        return int(self._ask(Operation.ADD, key, b"%d" % value))

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Store `desired_value` if `key` has `expected_value`; a key that is not there has the value `b""`.

        Returns what the key has then; for one that is still not there, `expected_value`.
        """
        return self._ask(Operation.COMPARE_SET, key, _bytes(expected_value), _bytes(desired_value))

    def delete_key(self, key: str) -> bool:
        """Whether the key was there; it is gone now."""
        return self._ask(Operation.DELETE, key) == b"1"

    def num_keys(self) -> int:
        """Keys in the table of the whole group."""
        return int(self._call(Operation.COUNT, [], seconds=_SECONDS))

    def append(self, key: str, value: bytes | str) -> None:
        """Write `value` behind what the key has; a key that is not there begins empty."""
        self._ask(Operation.APPEND, key, _bytes(value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of `keys` in their order; waits for each in turn, as `get` does."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes | str]) -> None:
        """Store `values[i]` under `keys[i]`, one after another. Raises ValueError when the lengths differ."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """True: `append`, `multi_get` and `multi_set` are there. Torch asks before it uses them."""
        return True

    def clone(self) -> GroupStore:
        """Torch asks for one per thread that must not wait for another's operation: here none does."""
        return self

    # Under these names torch's C++ half looks for them.
    deleteKey = delete_key
    getNumKeys = num_keys

    def _ask(self, operation: Operation, key: str, *fields: bytes) -> bytes:
        return self._call(operation, [key.encode(), *fields], seconds=_SECONDS)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
