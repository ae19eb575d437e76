"""Every product finds its own matrix in the buffer it reads, in whatever order a device does what it was asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.kernels.quantized import SplitByteWeight
from tandem_worker.model.backends.triton import ahead
from tandem_worker.model.backends.triton.ahead import InOrder, Turn, Turns, WidenAhead


class TwoStreams:
    """A device and its `Lane`: what is asked for is done later, by `run`, in any order that streams and waits allow."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[Callable[[], object], set[int]]] = {}
        self._asked = 0
        self._last: dict[str, set[int]] = {"main": set(), "side": set()}
        self._on = "main"
        self.num_beside = 0

    def ask(self, work: Callable[[], object]) -> None:
        self._left[self._asked] = work, self._last[self._on]
        self._last[self._on] = {self._asked}
        self._asked += 1

    def start(self, work: Callable[[], None]) -> set[int]:
        self._last["side"] = self._last["side"] | self._last["main"]
        self._on = "side"
        work()
        self._on = "main"
        self.num_beside += 1
        return self._last["side"]

    def join(self, started: set[int]) -> None:
        self._last["main"] = self._last["main"] | started

    def run(self, chance: random.Random) -> None:
        while self._left:
            ready = [number for number, (_, before) in self._left.items() if not before & self._left.keys()]
            self._left.pop(chance.choice(ready))[0]()


def weights(count: int) -> list[SplitByteWeight]:
    """Of several sizes; `beside` says which one it is."""
    return [
        SplitByteWeight(
            low=torch.zeros(1 + number % 3, 32, dtype=torch.int16),
            codes=torch.zeros(1 + number % 3, 32, dtype=torch.uint8),
            beside=torch.tensor([number], dtype=torch.int32),
        )
        for number in range(count)
    ]


def multiply(device: TwoStreams, monkeypatch: pytest.MonkeyPatch, chance: random.Random, steps: list[list[int]]) -> int:
    """Runs steps over 7 matrices; how many products read another matrix than their own."""

    def widen(like: torch.Tensor, weight: SplitByteWeight, *, out: torch.Tensor) -> None:
        device.ask(lambda: out.fill_(float(weight.beside[0])))

    wrong = []
    with monkeypatch.context() as patch:
        patch.setattr(ahead, "kernels", SimpleNamespace(widen=widen))
        widened = WidenAhead(weights(7), device)
        for step in steps:
            for matrix in step:
                found = widened.take(matrix, torch.zeros(1))
                device.ask(lambda found=found, matrix=matrix: wrong.append(not bool((found == matrix).all())))
            if chance.random() < 0.3:
                device.run(chance)
        device.run(chance)
    assert len(wrong) == sum(map(len, steps))
    return sum(wrong)


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=9), min_size=1, max_size=5), st.integers(0, 2**32))
def test_every_product_reads_its_own_matrix(steps: list[list[int]], seed: int) -> None:
    monkeypatch = pytest.MonkeyPatch()
    assert multiply(TwoStreams(), monkeypatch, random.Random(seed), steps) == 0


def start_at_once(self: Any, work: Callable[[], None]) -> set[int]:
    self._on = "side"
    work()
    self._on = "main"
    return self._last["side"]


@pytest.mark.parametrize(("name", "careless"), [("join", lambda self, started: None), ("start", start_at_once)])
def test_a_device_that_does_not_wait_would_be_noticed(
    name: str, careless: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoStreams, name, careless)
    wrong = [multiply(TwoStreams(), monkeypatch, random.Random(seed), [list(range(7))] * 3) for seed in range(20)]
    assert sum(wrong) > 0


def test_from_the_second_step_on_each_is_widened_beside_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    device = TwoStreams()
    multiply(device, monkeypatch, random.Random(1), [list(range(7))] * 3)
    assert device.num_beside == 2 * 6  # the first of a step is nobody's successor


def test_turns() -> None:
    turns = Turns()
    assert [turns.take(matrix) for matrix in (4, 5, 6)] == [
        Turn(0, False, None),
        Turn(1, False, None),
        Turn(0, False, None),
    ]
    assert turns.take(4) == Turn(1, False, 5)
    assert turns.take(5) == Turn(0, True, 6)
    assert turns.take(9) == Turn(1, False, None)  # out of turn: 6 is given up
    assert turns.take(6) == Turn(0, False, None)
    assert turns.take(4) == Turn(1, False, 5)


def test_where_there_is_one_stream_all_is_done_in_order() -> None:
    done: list[int] = []
    lane = InOrder()
    lane.join(lane.start(lambda: done.append(1)))
    assert done == [1]


def test_the_two_buffers_stay_those_of_the_largest_matrix() -> None:
    generator = torch.Generator().manual_seed(1)
    plain = [torch.randn(rows, 128, generator=generator).bfloat16() for rows in (64, 192, 128)]
    packed: list[Any] = [SplitByteWeight.pack(values) for values in plain]
    widened = WidenAhead(packed, InOrder())
    like = torch.zeros(1, dtype=torch.bfloat16)
    places = set()
    for _ in range(3):
        for number, values in enumerate(plain):
            found = widened.take(number, like)
            assert torch.equal(found, values)
            places.add((found.untyped_storage().data_ptr(), found.untyped_storage().nbytes()))
    assert len(places) == 2
    assert {size for _, size in places} == {2 * 192 * 128}


@pytest.mark.parametrize("failing", range(5))
def test_a_matrix_that_could_not_be_widened_is_not_taken_for_one_that_was(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory runs out a step fails, and the next one is computed."""
    made: list[int] = []

    def widen(like: torch.Tensor, weight: SplitByteWeight, *, out: torch.Tensor) -> None:
        made.append(int(weight.beside[0]))
        if len(made) == failing + 4:
            raise torch.OutOfMemoryError
        out.fill_(float(weight.beside[0]))

    monkeypatch.setattr(ahead, "kernels", SimpleNamespace(widen=widen))
    widened = WidenAhead(weights(3), InOrder())
    failed = 0
    for _ in range(6):
        for matrix in range(3):
            try:
                found = widened.take(matrix, torch.zeros(1))
            except torch.OutOfMemoryError:
                failed += 1
                break
            assert bool((found == matrix).all())
    assert failed == 1
