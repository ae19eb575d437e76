"""Blocks as objects of Mooncake's store: their names, what is known of them here, and what its codes mean.

An object is a slot of `format`, header and sums included; its key is the tier's key and the block's name. What is there
is others' doing too, so this side knows a part: what it has written, and what it has asked for.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tandem_worker.tiers.errors import STORE_FAILED, STORE_FULL, STORE_UNREACHABLE, TierError
from tandem_worker.tiers.format import Geometry, TierKey, plan_geometry
from tandem_worker.tiers.mooncake.client import MooncakeClient
from tandem_worker.tiers.slots import PIECE_BYTES, fill_headers
from tandem_worker.tiers.store import Place

ASK_SECONDS, MOVE_SECONDS = 1.0, 3.0
"""Deadlines of a look-up, and of a `put` or `get` of a few MiB. What is later ends the helper process."""
ABSENT_SECONDS = 5.0
"""What was not there is not asked for again that long, nor is what could not be had."""
_MOST_SLOTS = 16
"""In one `put` or `get`. Where another holder does not answer, Mooncake gives up four of them at a time."""
MOST_NAMES = 256
"""In one look-up."""
_MOST_KNOWN = 1 << 18
_NOT_THERE = frozenset({-703, -704, -706, -707})
"""Mooncake's codes for: not written to its end, not found, held, given up meanwhile."""
_DAMAGED = frozenset({-1102, -400})
"""Codes for: a file could not be read, or what stands there is another object. All that was read from the same disk has
them, and one is meant."""
_EXISTS, _ABSENT, _FULL = -705, -704, -200
_FAILURES = 3
"""So many calls in a row that fail switch the tier off. One does not: the first one after a restart of the other side
fails always."""
_FULL_SECONDS = 10.0
"""Mooncake makes room once it lacks some. A store that has none for so long is full."""
_SEED = 0x4552_4F54_534B_564D
_PRESENT = 0.0


class ObjectSlots:
    """`tiers.slots.SlotStore`."""

    def __init__(
        self,
        client: MooncakeClient,
        key: TierKey,
        layer_bytes: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._key, self._clock = client, key, clock
        self.geometry: Geometry = plan_geometry(layer_bytes, 0)
        self.most_slots = plan_most_slots(self.geometry)
        self._prefix = f"tandem-{key.digest.hex()}-"
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, float] = OrderedDict()
        """`_PRESENT`, or until when a block counts as absent."""
        self._num_present = 0
        self._failures = 0
        self._full_since: float | None = None
        self._taken = 0
        self.answered_at = clock()
        """When something was written last, which takes holder and master."""

    def __len__(self) -> int:
        """Blocks that are known to be there."""
        return self._num_present

    def allocate(self, count: int) -> np.ndarray:
        size = count * self.geometry.slot_bytes
        with self._lock:
            first, self._taken = self._taken, self._taken + size
        return self._client.memory[first : first + size].reshape(count, -1)

    def seed(self, place: Place) -> int:
        return _SEED

    def use(self, place: Place) -> None:
        """Mooncake knows what was read."""

    def has(self, name: bytes) -> bool:
        with self._lock:
            return self._known.get(name) == _PRESENT

    # -- what is known -----------------------------------------------------------------------------------------------

    def count_known(self, names: Sequence[bytes]) -> int | None:
        """How many of the leading names are there; None: it has to be asked."""
        now = self._clock()
        with self._lock:
            for index, name in enumerate(names):
                until = self._known.get(name)
                if until is None or _PRESENT < until <= now:
                    return None
                if until != _PRESENT:
                    return index
        return len(names)

    def count_present(self, names: Sequence[bytes]) -> int:
        """How many of the leading names are known to be there."""
        with self._lock:
            return next((index for index, name in enumerate(names) if self._known.get(name) != _PRESENT), len(names))

    def ask(self, names: Sequence[bytes]) -> None:
        """Find out which are there: up to the first one that is not, and all of the first `MOST_NAMES`."""
        for start in range(0, len(names), MOST_NAMES):
            some = names[start : start + MOST_NAMES]
            codes = self._call_twice("exist", some)
            there = [code == 1 for code in codes]
            self._note(name for name, code in zip(some, there, strict=True) if code)
            self.note_absent([name for name, code in zip(some, there, strict=True) if not code])
            if not all(there):
                return

    def note_absent(self, names: Sequence[bytes]) -> None:
        """They count as absent for a while."""
        self._note(names, self._clock() + ABSENT_SECONDS)

    def forget(self) -> None:
        """Whatever was there, it may be gone."""
        with self._lock:
            self._known.clear()
            self._num_present = 0
        self._failures, self._full_since = 0, None

    def _note(self, names: Iterable[bytes], until: float = _PRESENT) -> None:
        with self._lock:
            for name in names:
                self._num_present += (until == _PRESENT) - (self._known.pop(name, 1.0) == _PRESENT)
                self._known[name] = until
            while len(self._known) > _MOST_KNOWN:
                self._num_present -= self._known.popitem(last=False)[1] == _PRESENT

    # -- calls -------------------------------------------------------------------------------------------------------

    def read(self, places: Sequence[Place], names: Sequence[bytes], rows: np.ndarray) -> int:
        codes = self._find_damaged(names, self._move("get", self._name(names), rows), rows)
        good = next((index for index, code in enumerate(codes) if code != self.geometry.slot_bytes), len(codes))
        if good < len(codes):
            self.note_absent(names[good:])
            strange = [key for key, code in zip(names, codes, strict=True) if 0 <= code != self.geometry.slot_bytes]
            if strange:  # of another length: nobody else's name is like this, and it would be in the way of the block
                self._client.call("remove", self._name(strange), seconds=ASK_SECONDS)
            failed = [code for code in codes[good:] if code < 0 and code not in _NOT_THERE]
            if failed:
                self._fail(f"a block could not be read (Mooncake's code {failed[0]})")
                return good
        self._failures = 0
        return good

    def _find_damaged(self, names: Sequence[bytes], codes: Sequence[int], rows: np.ndarray) -> Sequence[int]:
        """Codes of a read, after a disk's damage has failed all that was read from it: each block is read alone up to
        the first one that fails. That one's row is empty then, as a block is that has lost all of its bytes."""
        found = list(codes)
        for index, (name, code) in enumerate(zip(names, codes, strict=True)):
            if code not in _DAMAGED:
                continue
            (found[index],) = self._move("get", self._name([name]), rows[index : index + 1])
            if found[index] in _DAMAGED:
                rows[index] = 0
                found[index] = self.geometry.slot_bytes
                found[index + 1 :] = [_ABSENT] * (len(found) - index - 1)
                break
        return found

    def write(self, names: Sequence[bytes], rows: np.ndarray) -> int:
        fill_headers(self, self._key, [Place(0, 0)] * len(names), names, rows)
        codes = self._move("put", self._name(names), rows[: len(names)])
        written = [name for name, code in zip(names, codes, strict=True) if code in (0, _EXISTS)]
        self._note(written)
        failed = [code for code in codes if code not in (0, _EXISTS)]
        if _FULL in failed:
            self._note_full()
        elif failed:
            self._fail(f"a block could not be written (Mooncake's code {failed[0]})")
        if 0 in codes:
            self.answered_at = self._clock()
        if written:
            self._failures, self._full_since = 0, None
        return len(written)

    def discard(self, place: Place, name: bytes) -> None:
        """It stays away from this worker for a while even where Mooncake does not remove it."""
        self.note_absent([name])
        self._client.call("remove", self._name([name]), seconds=ASK_SECONDS)

    def probe(self, rows: np.ndarray) -> float:
        """Write objects, read them and remove them: seconds of reading. Raises TierError."""
        keys = [f"{self._prefix}probe-{secrets.token_hex(8)}-{index}" for index in range(len(rows))]
        sent = np.frombuffer(secrets.token_bytes(4096), np.uint8)
        rows[:, :4096] = sent
        codes = self._move("put", keys, rows)
        if any(codes):
            codes = self._move("put", [f"{key}-again" for key in keys], rows)
            keys = [f"{key}-again" for key in keys]
        if _FULL in codes:
            raise TierError(STORE_FULL, "the store has no room for another object; raise spec.kv.store.memory")
        if any(codes):
            raise TierError(
                STORE_UNREACHABLE, f"nothing can be written: the master does not answer (Mooncake's code {min(codes)})"
            )
        rows[:, :4096] = 0
        began = time.perf_counter()
        codes = self._move("get", keys, rows)
        seconds = time.perf_counter() - began
        intact = all(np.array_equal(row[:4096], sent) for row in rows)
        self._client.call("remove", keys, seconds=ASK_SECONDS)
        if any(code != self.geometry.slot_bytes for code in codes) or not intact:
            raise TierError(STORE_FAILED, f"what was written just now does not come back (Mooncake's codes {codes})")
        self.answered_at = self._clock()
        return seconds

    def _name(self, names: Sequence[bytes]) -> list[str]:
        return [self._prefix + name.hex() for name in names]

    def _move(self, call: str, keys: Sequence[str], rows: np.ndarray) -> Sequence[int]:
        first = rows.ctypes.data - self._client.memory.ctypes.data
        return self._client.call(call, keys, first, self.geometry.slot_bytes, seconds=MOVE_SECONDS)

    def _call_twice(self, call: str, names: Sequence[bytes]) -> Sequence[int]:
        for again in (True, False):
            codes = self._client.call(call, self._name(names), seconds=ASK_SECONDS)
            if min(codes) >= 0:
                self._failures = 0
                return codes
            if not again:
                raise TierError(STORE_UNREACHABLE, f"the master does not answer (Mooncake's code {min(codes)})")
        raise AssertionError("the second try returns or raises")

    def _fail(self, what: str) -> None:
        self._failures += 1
        if self._failures >= _FAILURES:
            raise TierError(STORE_FAILED, f"{what}, {self._failures} times in a row")

    def _note_full(self) -> None:
        now = self._clock()
        self._full_since = self._full_since or now
        if now - self._full_since >= _FULL_SECONDS:
            raise TierError(
                STORE_FULL, f"the store has had no room for {_FULL_SECONDS:g} s; raise spec.kv.store.memory"
            )


def plan_most_slots(geometry: Geometry) -> int:
    """Objects that one call takes."""
    return max(1, min(_MOST_SLOTS, PIECE_BYTES // geometry.slot_bytes))
