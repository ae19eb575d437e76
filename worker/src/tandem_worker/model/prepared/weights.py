"""A model's weights as its kernels read them, from one start for the next.

One entry of the store holds every tensor that the loader handed out, in order, each under a key that says what was
asked for: names, shapes, what this rank takes of them, and in which layout. At a start it is read while torch is
imported, and what the loader asks for is handed out of it, but only what was asked for the last time too, and only once
its sums are right. From the first difference on the rest is loaded from the checkpoint.

    8 bytes            length of the list, little-endian
    list               JSON: a key, where the tensor begins and its bytes, for each tensor
    tensors            each at a multiple of 64
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_hexdigest

from tandem_worker.model.prepared.entry import DamagedError
from tandem_worker.model.prepared.memory import ALIGNMENT, address_of
from tandem_worker.model.prepared.reading import Reading, cpu_features, open_library
from tandem_worker.model.prepared.store import PreparedStore

logger = logging.getLogger(__name__)

LAYOUT = 2
"""Changes with everything that changes a byte of what is handed out: the kernels' layout, how stored types are widened,
what a key means."""
_LENGTH = 8
_LONGEST_LIST = 256 << 20
_NICE = 19


def open_prepared_weights(
    store: PreparedStore, digest: str, facts: Mapping[str, object], forms: Sequence[str] = ("plain",)
) -> PreparedWeights:
    """The weights of the model that `digest` names, being read in the background from now on where there is a copy.

    `facts` are what else decides the tensors, as JSON has it: the element type that is configured and this rank's
    share. `forms` are those that matrices may have here, `plain` or `lossless`, the likeliest first: the first that has
    a copy is read until `settle` says which it is. A copy that does not fit all the same is seen by its keys. Needs no
    torch and returns within milliseconds.
    """
    named = {"layout": LAYOUT, "cpu": sorted(flag for flag in cpu_features() if flag.startswith("avx512")), **facts}
    # What chooses the form, caches and quotas among it, differs among workers that hold the same: it is in no name.
    # "Lossless" was the name of copies in which what was quantized stood plain.
    told = {"plain": named, "lossless": named | {"weights": "12 bits"}}
    names = {form: f"weights-{digest}-{_digest_of(facts)}" for form, facts in told.items()}
    weights = PreparedWeights(store, names)
    weights.begin(forms)
    return weights


def _digest_of(facts: Mapping[str, object]) -> str:
    return xxh3_64_hexdigest(json.dumps(facts, sort_keys=True).encode())


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One that was handed out."""

    key: str
    address: int
    size: int
    owner: object


class PreparedWeights:
    """What one start hands out. `take` and `put` are the loader's, on one thread; `save` is called when all is loaded,
    on any thread."""

    def __init__(self, store: PreparedStore, names: Mapping[str, str]) -> None:
        """`names` are those of copies, by the form of the matrices in them."""
        self._store = store
        self._names = dict(names)
        self.name = next(iter(self._names.values()))
        self._reading: Reading | None = None
        self._list: list[tuple[str, int, int]] | None = None
        self._tensors: list[_Tensor] = []
        self._missed = False
        """Whether something was handed out that no copy held."""

    def begin(self, forms: Sequence[str]) -> None:
        """Read the first copy that there is of `forms`, where kernels multiply it."""
        self.name, library = self._names[forms[0]], open_library()
        if library is None:
            return
        for form in forms:
            entry = self._store.open(self._names[form])
            if entry is None:
                continue
            self.name = self._names[form]
            try:
                self._reading = Reading(library, entry)
            except OSError as error:
                entry.close()
                logger.warning("there is no memory for the prepared weights: %s", error)
            return

    def settle(self, form: str) -> None:
        """Matrices are of that form, before anything is taken or put: the copy is read again where it is another."""
        if self._names[form] != self.name:
            self.finish()
            self.name = self._names[form]
            self.begin([form])

    @property
    def found(self) -> bool:
        """Whether there is a copy of which everything so far was right."""
        return self._reading is not None

    @property
    def is_whole(self) -> bool:
        """Whether all that was handed out came from a copy."""
        return bool(self._tensors) and not self._missed

    def take(self, key: str, size: int | None) -> tuple[mmap.mmap, int, int] | None:
        """The tensor that is asked for next, of `size` bytes, or of as many as it has: a map, where in it the tensor
        begins, and its bytes. They may be read for as long as the map is kept. None where the copy has no such tensor:
        it is to be loaded, and then `put`."""
        reading = self._reading
        if reading is None:
            return None
        try:
            start, size = self._find(reading, key, size)
            reading.wait(start, start + size)
        except (DamagedError, OSError) as error:
            self._store.discard(reading.entry, error)
            self.finish()
            return None
        self._tensors.append(_Tensor(key, address_of(reading.memory) + start, size, reading.memory))
        return reading.memory, start, size

    def put(self, key: str, address: int, size: int, owner: object) -> None:
        """A tensor that was loaded: `size` bytes at `address`, which stay the same for as long as `owner` lives."""
        self._missed = True
        self._tensors.append(_Tensor(key, address, size, owner))

    def finish(self) -> None:
        """All is loaded: reading ends. Tensors that were handed out stay."""
        if self._reading is not None:
            self._reading.end()
            self._reading = None

    def save(self) -> bool:
        """Keep what was handed out for the next start, unless it all came from a copy; whether there is one now.

        Takes about a second per GB, on a thread of the lowest priority, and no memory worth mention. Until it is done
        it holds on to the tensors.
        """
        tensors, missed = self._tensors, self._missed
        self._tensors, self._missed = [], False
        if not missed:
            return bool(tensors)
        saved: list[bool] = []
        thread = threading.Thread(target=lambda: saved.append(self._write(tensors)), name="save-weights", daemon=True)
        thread.start()
        thread.join()
        return saved == [True]

    def _find(self, reading: Reading, key: str, size: int | None) -> tuple[int, int]:
        """Beginning and bytes of the tensor that is handed out next, if it is that of `key`. Raises DamagedError."""
        if self._list is None:
            self._list = _read_list(reading)
        number = len(self._tensors)
        found, start, count = self._list[number] if number < len(self._list) else ("", 0, 0)
        if found != key or (size is not None and count != size):
            raise DamagedError(f"its tensor {number} is not the one that is asked for, {key}")
        return start, count

    def _write(self, tensors: list[_Tensor]) -> bool:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        began = time.monotonic()
        head, starts, size = _plan([(tensor.key, tensor.size) for tensor in tensors])
        saved = self._store.stream(self.name, size, _pieces(head, tensors, starts))
        if saved:
            logger.info("prepared weights are kept: %.1f MB in %.1f s", size / 1e6, time.monotonic() - began)
        return saved


def _plan(tensors: list[tuple[str, int]]) -> tuple[bytes, list[int], int]:
    """For keys and sizes: what the payload begins with, where each tensor begins, and how long the payload is."""
    length = 0
    while True:  # the list holds offsets, which depend on its length
        starts, end = [], _align(_LENGTH + length)
        for _, size in tensors:
            starts.append(end)
            end = _align(end + size)
        rows = [[key, start, size] for (key, size), start in zip(tensors, starts, strict=True)]
        text = json.dumps(rows, separators=(",", ":")).encode()
        if len(text) <= length:
            return length.to_bytes(_LENGTH, "little") + text.ljust(length), starts, end
        length = len(text)


def _pieces(head: bytes, tensors: list[_Tensor], starts: list[int]) -> Iterator[memoryview]:
    yield memoryview(head)
    end = len(head)
    for tensor, start in zip(tensors, starts, strict=True):
        yield memoryview(bytes(start - end))
        yield memoryview((ctypes.c_ubyte * tensor.size).from_address(tensor.address)).cast("B")
        end = start + tensor.size
    yield memoryview(bytes(_align(end) - end))


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _read_list(reading: Reading) -> list[tuple[str, int, int]]:
    """Keys, beginnings and sizes of the tensors.

    Raises DamagedError where there is something else, OSError when it cannot be read.
    """
    size = reading.entry.size
    if size < _LENGTH:
        raise DamagedError("it is too short")
    reading.wait(0, _LENGTH)
    length = int.from_bytes(reading.memory[:_LENGTH], "little")
    if length > min(size - _LENGTH, _LONGEST_LIST):
        raise DamagedError("the list of its tensors is longer than it")
    reading.wait(0, _LENGTH + length)
    try:
        rows = [
            (str(key), int(start), int(count))
            for key, start, count in json.loads(reading.memory[_LENGTH : _LENGTH + length])
        ]
    except (ValueError, TypeError) as error:
        raise DamagedError(f"the list of its tensors cannot be read: {error}") from error
    for key, start, count in rows:
        if start % ALIGNMENT or count < 0 or not _LENGTH + length <= start <= size - count:
            raise DamagedError(f"its tensor {key} is said to lie outside of it")
    return rows
