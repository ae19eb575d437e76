"""What is known of objects here, and what Mooncake's codes come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.tiers.errors import STORE_FAILED, STORE_FULL, STORE_UNREACHABLE, TierError
from tandem_worker.tiers.format import is_intact
from tandem_worker.tiers.mooncake.objects import ABSENT_SECONDS, ObjectSlots
from tandem_worker.tiers.mooncake.tier import StoreTier
from tandem_worker.tiers.store import Place

from tests.tandem_worker.tiers.rig import KEY

LAYERS = (64, 32)
NAMES = [bytes([index]) * 16 for index in range(8)]
PLACES = [Place(0, index) for index in range(8)]


class Client:
    """Keeps objects, or answers with the codes that it is given."""

    def __init__(self) -> None:
        self.memory = np.zeros(1 << 20, np.uint8)
        self.objects: dict[str, bytes] = {}
        self.codes: list[Sequence[int]] = []
        self.calls: list[str] = []

    def call(self, call: str, keys: Sequence[str], first: int = 0, size: int = 0, *, seconds: float) -> Sequence[int]:
        self.calls.append(call)
        if self.codes:
            return self.codes.pop(0)
        spans = [slice(first + index * size, first + (index + 1) * size) for index in range(len(keys))]
        match call:
            case "put":
                for key, span in zip(keys, spans, strict=True):
                    self.objects[key] = self.memory[span].tobytes()
                return [0] * len(keys)
            case "get":
                for key, span in zip(keys, spans, strict=True):
                    if key in self.objects:
                        self.memory[span] = np.frombuffer(self.objects[key], np.uint8)
                return [size if key in self.objects else -704 for key in keys]
            case "exist":
                return [int(key in self.objects) for key in keys]
            case _:
                return [0 if self.objects.pop(key, None) else -704 for key in keys]


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.client: Any = Client()
        self.slots = ObjectSlots(self.client, KEY, LAYERS, lambda: self.now)
        self.rows = self.slots.allocate(8)

    def write(self, names: Sequence[bytes], seed: int = 0) -> int:
        self.rows[:] = np.random.default_rng(seed).integers(0, 255, self.rows.shape, np.uint8)
        return self.slots.write(names, self.rows[: len(names)])


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_what_is_written_is_read_and_is_intact(rig: Rig) -> None:
    assert rig.write(NAMES[:3]) == 3
    sent = rig.rows[:3].copy()
    rig.rows[:] = 0
    assert rig.slots.read(PLACES[:3], NAMES[:3], rig.rows) == 3
    assert np.array_equal(rig.rows[:3], sent)
    for row, name, place in zip(rig.rows, NAMES[:3], PLACES, strict=False):
        assert is_intact(row.data, rig.slots.geometry, KEY, name, rig.slots.seed(place))


def test_a_block_that_answers_to_another_ones_name_is_not_intact(rig: Rig) -> None:
    rig.write(NAMES[:2])
    one, two = rig.client.objects
    rig.client.objects[one] = rig.client.objects[two]
    rig.slots.read(PLACES[:1], NAMES[:1], rig.rows)
    assert not is_intact(rig.rows[0].data, rig.slots.geometry, KEY, NAMES[0], rig.slots.seed(PLACES[0]))


def test_names_have_the_key_in_them(rig: Rig) -> None:
    rig.write(NAMES[:1])
    assert list(rig.client.objects) == [f"tandem-{KEY.digest.hex()}-{NAMES[0].hex()}"]


def test_what_is_not_known_has_to_be_asked(rig: Rig) -> None:
    rig.write(NAMES[:2])
    assert rig.slots.count_known(NAMES[:2]) == 2
    assert rig.slots.count_known(NAMES[:3]) is None
    rig.slots.ask(NAMES)
    assert rig.slots.count_known(NAMES) == 2
    assert len(rig.slots) == 2
    rig.now += ABSENT_SECONDS + 1
    assert rig.slots.count_known(NAMES) is None


def test_a_long_chain_is_asked_up_to_where_it_ends(rig: Rig) -> None:
    names = [index.to_bytes(16, "big") for index in range(2000)]
    rig.slots.ask(names)
    assert rig.client.calls == ["exist"]
    rig.client.objects.update(dict.fromkeys(rig.slots._name(names[:300]), b""))
    rig.slots.ask(names)
    assert rig.client.calls == ["exist"] * 3
    assert rig.slots.count_known(names) == 300


def test_what_was_given_up_is_written_again(rig: Rig) -> None:
    rig.write(NAMES[:3])
    rig.client.objects.clear()
    assert rig.slots.has(NAMES[0])
    assert rig.slots.read(PLACES[:3], NAMES[:3], rig.rows) == 0
    assert not rig.slots.has(NAMES[0])


def test_a_damaged_one_is_removed(rig: Rig) -> None:
    rig.write(NAMES[:1])
    rig.slots.discard(PLACES[0], NAMES[0])
    assert not rig.client.objects
    assert rig.slots.count_known(NAMES[:1]) == 0


def test_one_of_another_length_makes_room_for_the_block(rig: Rig) -> None:
    rig.write(NAMES[:2])
    (key, _) = rig.client.objects
    rig.client.codes = [[100, rig.slots.geometry.slot_bytes]]
    assert rig.slots.read(PLACES[:2], NAMES[:2], rig.rows) == 0
    assert key not in rig.client.objects
    assert rig.slots.count_known(NAMES[:1]) == 0


@pytest.mark.parametrize("code", [-1102, -400])
def test_a_disk_that_cannot_read_one_block_costs_that_one(rig: Rig, code: int) -> None:
    """Mooncake says so of all four; read alone the third one is what fails. The last one is not asked for again."""
    rig.write(NAMES[:4])
    size = rig.slots.geometry.slot_bytes
    rig.client.codes = [[code] * 4, [size], [size], [code]]
    rig.rows[:] = 7
    assert rig.slots.read(PLACES[:4], NAMES[:4], rig.rows) == 3
    assert rig.client.calls[-4:] == ["get"] * 4
    row = rig.rows[2]
    assert not row.any()
    assert not is_intact(row.data, rig.slots.geometry, KEY, NAMES[2], rig.slots.seed(PLACES[2]))


def test_blocks_in_memory_beside_damaged_ones_are_read_once(rig: Rig) -> None:
    rig.write(NAMES[:3])
    size = rig.slots.geometry.slot_bytes
    rig.client.codes = [[size, -1102, size], [size]]
    assert rig.slots.read(PLACES[:3], NAMES[:3], rig.rows) == 3
    assert rig.client.calls[-2:] == ["get"] * 2


def test_it_is_known_when_the_store_last_took_something(rig: Rig) -> None:
    rig.now += 5
    rig.client.codes = [[-900]]
    rig.write(NAMES[:1])
    assert rig.slots.answered_at < rig.now
    rig.client.codes = [[-705]]  # it was there, which the master knows without any holder
    rig.write(NAMES[:1])
    assert rig.slots.answered_at < rig.now
    rig.write(NAMES[1:2])
    assert rig.slots.answered_at == rig.now
    rig.now += 5
    rig.slots.probe(rig.rows[:1])
    assert rig.slots.answered_at == rig.now


def test_a_look_up_is_tried_twice(rig: Rig) -> None:
    rig.client.codes = [[-900] * 3]
    rig.slots.ask(NAMES[:3])
    assert rig.client.calls == ["exist", "exist"]
    rig.client.codes = [[-900] * 3, [-900] * 3]
    with pytest.raises(TierError, match="the master does not answer") as caught:
        rig.slots.ask(NAMES[:3])
    assert caught.value.reason == STORE_UNREACHABLE


class StartedClient(Client):
    """Answers no look-up while `deaf`."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.deaf = False

    def start(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def call(self, call: str, keys: Sequence[str], first: int = 0, size: int = 0, *, seconds: float) -> Sequence[int]:
        if self.deaf and call == "exist":
            return [-900] * len(keys)
        return super().call(call, keys, first, size, seconds=seconds)


def test_a_store_that_answers_no_look_ups_is_not_well_because_it_takes_and_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would fail with the next look-up, and be told as failing and as well by turns."""
    monkeypatch.setattr("tandem_worker.tiers.mooncake.tier.MooncakeClient", StartedClient)

    class Memory:
        layer_bytes = LAYERS

    tier = StoreTier("127.0.0.1:1", KEY, cast(Any, Memory()), 4)
    client = cast(Any, tier._client)
    tier._open()
    assert tier.health.on
    client.deaf = True
    tier.health.fail(TierError(STORE_UNREACHABLE, "the master does not answer"))
    tier._open()
    assert (tier.health.on, tier.stats().reason) == (False, STORE_UNREACHABLE)
    client.deaf = False
    tier._open()
    assert (tier.health.on, tier.stats().reason) == (True, None)


def test_the_third_failure_in_a_row_counts(rig: Rig) -> None:
    for _ in range(2):
        rig.client.codes = [[-800, -704]]
        assert rig.slots.read(PLACES[:2], NAMES[:2], rig.rows) == 0
    rig.write(NAMES[:1])
    for _ in range(2):
        rig.client.codes = [[-800]]
        rig.slots.read(PLACES[:1], NAMES[:1], rig.rows)
    rig.client.codes = [[-800]]
    with pytest.raises(TierError, match="3 times in a row") as caught:
        rig.slots.write(NAMES[:1], rig.rows[:1])
    assert caught.value.reason == STORE_FAILED


def test_no_room_is_a_failure_once_it_lasts(rig: Rig) -> None:
    rig.client.codes = [[0, -200]]
    assert rig.write(NAMES[:2]) == 1
    assert rig.slots.count_known(NAMES[:1]) == 1
    rig.client.codes = [[-200]]
    rig.write(NAMES[2:3])
    rig.now += 9
    rig.client.codes = [[-200]]
    rig.write(NAMES[2:3])
    rig.now += 2
    rig.client.codes = [[-200]]
    with pytest.raises(TierError, match=r"spec\.kv\.store\.memory") as caught:
        rig.write(NAMES[2:3])
    assert caught.value.reason == STORE_FULL


def test_a_probe_leaves_nothing_and_forgives_one_failure(rig: Rig) -> None:
    rig.client.codes = [[-900] * 2]
    rig.slots.probe(rig.rows[:2])
    assert not rig.client.objects
    rig.client.codes = [[-900] * 2, [-900] * 2]
    with pytest.raises(TierError, match="nothing can be written"):
        rig.slots.probe(rig.rows[:2])
    rig.client.codes = [[-200] * 2, [-200] * 2]
    with pytest.raises(TierError, match="no room"):
        rig.slots.probe(rig.rows[:2])
    rig.client.codes = [[0], [-704], [0]]
    with pytest.raises(TierError, match="does not come back"):
        rig.slots.probe(rig.rows[:1])


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 7), max_size=4)), max_size=12), st.integers(0, 8))
def test_what_it_knows_is_never_more_than_what_was_written(steps: list[tuple[bool, list[int]]], count: int) -> None:
    rig, there = Rig(), set[bytes]()
    for writes, indices in steps:
        names = [NAMES[index] for index in dict.fromkeys(indices)]
        if writes and names:
            rig.write(names)
            there.update(names)
        elif names:
            rig.slots.ask(names)
    known = rig.slots.count_known(NAMES[:count])
    leading = next((index for index, name in enumerate(NAMES[:count]) if name not in there), count)
    assert known is None or known == leading
    assert len(rig.slots) == len(there)
