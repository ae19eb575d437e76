"""What one worker has computed another need not, where it is told of it; tokens are those of an engine without any
cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.peer_rig import PeerRig
from tests.tandem_worker.tiers.rig import wait_until

MakePeer = Callable[..., PeerRig]


@pytest.fixture
def make_peer() -> Iterator[MakePeer]:
    rigs: list[PeerRig] = []

    def make(name: str = "", **options: object) -> PeerRig:
        rigs.append(PeerRig(name or f"worker-{len(rigs)}", **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def make_prompt(seed: int, length: int = 41) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(64) for _ in range(length))


def test_what_another_worker_has_computed_is_not_computed(make_peer: MakePeer) -> None:
    holder, puller = make_peer(), make_peer()
    prompt = make_prompt(1)
    answer = holder.run("a", prompt)
    assert puller.run("b", prompt, kv_source=holder.kv) == answer == greedy_answer(prompt, 8)
    assert puller.cached("b") == 40
    assert puller.model.num_tokens == 1 + 7  # type: ignore[attr-defined]
    assert puller.source.stats().tokens_read == holder.source.stats().tokens_written == 40
    wait_until(lambda: holder.engine._scheduler.blocks.num_held == 0)
