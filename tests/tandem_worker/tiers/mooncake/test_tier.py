"""What one worker computed another one finds in Mooncake's store, and tokens are those of an engine without any cache.

Master and holder are Mooncake's own processes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.mooncake.processes import Program, run_store
from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.mooncake.rig import StoreRig
from tests.tandem_worker.tiers.rig import wait_until


def make_prompt(seed: int, length: int = 41) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(64) for _ in range(length))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, Program]]:
    with run_store(tmp_path_factory.mktemp("mooncake")) as programs:
        yield programs


@pytest.fixture
def address(store: tuple[Program, Program]) -> str:
    return store[1].address


def test_what_one_worker_computed_another_one_loads(address: str) -> None:
    prompt = make_prompt(1)
    first, second = StoreRig(address), StoreRig(address)
    answer = first.run("a", prompt)
    wait_until(lambda: first.written == 12)
    assert second.run("b", prompt) == answer == greedy_answer(prompt, 8)
    assert second.cached("b") == 40
    assert second.tier.stats().tokens_read == 40
    assert second.engine.stats().cached_tokens_total == 40
    first.close()
    second.close()
