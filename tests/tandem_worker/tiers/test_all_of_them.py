"""Disk, a store that must be asked, and other workers, all beside each other in a small memory: aborts and preemptions
in between change no answer and leave nothing held, pinned or waiting."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tandem_worker.engine.tiers import LoadOrder, Offer, Run, TierEngine
from tandem_worker.tiers.combined import CombinedTier
from tandem_worker.tiers.disk import DiskLimits, DiskTier
from tandem_worker.tiers.fanout import SinkFanout
from tandem_worker.tiers.memory import open_memory
from tandem_worker.tiers.peers import PeerSource
from tandem_worker.tiers.stats import Counters

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig
from tests.tandem_worker.tiers.peer_rig import KEY, SLOT_BYTES, PeerRig
from tests.tandem_worker.tiers.rig import wait_until


class Store:
    """Blocks in a dict, of which it finds out on a thread what it has. It takes three at a time, and slowly."""

    wants_blocks = True

    def __init__(self, rig: Rig) -> None:
        self._memory = open_memory(rig.engine.kv_cache)
        self._rows: dict[bytes, np.ndarray] = {}
        self._known: dict[bytes, bool] = {}
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._random = random.Random(1)
        self.num_brought = 0

    def bind(self, engine: TierEngine) -> None:
        self.engine = engine

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        count = 0
        for name in names:
            known = self._known.get(name)
            if known is None or self._random.random() < 0.2:
                return Run(count=0, seconds=0.0)
            if not known:
                break
            count += 1
        return Run(count=count, seconds=0.0) if count else None

    def start_load(self, order: LoadOrder) -> None:
        self._start(self._ask if order.asks else self._bring, order)

    def _start(self, target: Callable[..., object], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _ask(self, order: LoadOrder) -> None:
        time.sleep(0.001)
        for name in order.asks:
            self._known[name] = name in self._rows
        self.engine.load_ended(order.load, 0)

    def _bring(self, order: LoadOrder) -> None:
        time.sleep(0.002)
        with self._lock:
            if order.load in self._cancelled:
                return
            rows = [self._rows[name] for name in order.names]
            self._memory.copy_in(np.stack(rows), 0, order.block_ids)
            self.num_brought += len(rows)
        self.engine.load_ended(order.load, len(order.names))

    def cancel(self, load: int) -> None:
        with self._lock:
            self._cancelled.add(load)

    def passes(self, name: bytes, reused: bool) -> bool:
        return name in self._rows

    def due(self) -> None:
        self._start(self.engine.offer_blocks, 3)

    def offered(self, offer: Offer | None) -> None:
        if offer is not None:
            self._start(self._write, offer)

    def _write(self, offer: Offer) -> None:
        assert len(offer.names) <= 3
        rows = np.zeros((len(offer.names), sum(self._memory.layer_bytes)), np.uint8)
        time.sleep(0.001)
        self._memory.copy_out(offer.block_ids, rows, 0, offer.fence)
        self.engine.hand_back(offer)
        for name, row in zip(offer.names, rows, strict=True):
            self._rows[name] = row
        self.engine.offer_blocks(3)

    def close(self) -> None:
        while self._threads:
            self._threads.pop().join(60)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 8))])
def test_whatever_happens_answers_are_the_same_and_nothing_is_left(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    holder = PeerRig("holder", 512)
    rig = Rig(HistoryModel(), 72, model_digest=KEY.model_digest, host_blocks=16)  # type: ignore[arg-type]
    rig.engine._scheduler.hooks.prefill_rate = lambda: 5.0
    memory = open_memory(rig.engine.kv_cache)
    limits = DiskLimits(size_bytes=8 << 20, segment_bytes=16 * SLOT_BYTES, cold_share=0.5)
    disk, store = DiskTier(tmp_path, KEY, memory, BLOCK_SIZE, limits), Store(rig)
    peers = PeerSource(
        replace(holder.terms, memory=open_memory(rig.engine.kv_cache)),
        BLOCK_SIZE,
        counters=Counters(BLOCK_SIZE, "peer"),
    )
    sink = SinkFanout([disk, store], most_kept=5)
    desk = rig.engine.open_desk(CombinedTier([disk, store, peers], sink), cold_blocks=73, fence=memory.fence)
    sink.bind(desk)
    peers.bind(desk)
    disk.start()
    peers.start()
    wait_until(lambda: disk.health.on)
    heads = [tuple(rng.randrange(64) for _ in range(rng.randrange(8, 60))) for _ in range(6)]
    for number, head in enumerate(heads[:4]):
        holder.run(f"h{number}", head)
    aborted: set[int] = set()
    prompts: list[tuple[int, ...]] = []
    for number in range(32):
        head = rng.choice(heads)
        tail = [rng.randrange(64) for _ in range(rng.randrange(1, 20))]
        prompts.append((*head[: rng.randrange(4, len(head) + 1)], *tail))
        said = {"kv_source": holder.kv, "kv_source_tokens": rng.choice([0, 8, 40])} if rng.random() < 0.5 else {}
        rig.submit(f"r{number}", prompts[-1], max_tokens=rng.randrange(1, 32), **said)
        if rng.random() < 0.2:
            aborted.add(rng.randrange(max(0, number - 4), number + 1))
            rig.engine.abort(f"r{max(aborted)}")
        if number % 8 == 7:
            rig.wait()
    rig.wait()
    for number, prompt in enumerate(prompts):
        tokens = rig.out.tokens(f"r{number}")
        assert tokens == greedy_answer(prompt, 32)[: len(tokens)]
        assert rig.out.reason(f"r{number}") is not None
    cache = rig.engine._scheduler.blocks.cache
    wait_until(lambda: not any(cache._pinned))  # type: ignore[attr-defined]
    counts = store.num_brought, disk.stats().tokens_read, peers.stats().tokens_read
    assert sum(counts)
    peers.close()
    store.close()
    disk.close()
    rig.close()
    wait_until(lambda: holder.engine._scheduler.blocks.num_held == 0)
    holder.close()
    assert rig.engine._scheduler.blocks.num_held == 0
    assert not rig.engine._scheduler.queues.loading
    assert rig.engine._scheduler.queues.queued_prefill_tokens == 0
    assert rig.engine.failure is None


def test_what_the_disk_has_of_the_beginning_and_a_peer_of_the_rest_is_joined(tmp_path: Path) -> None:
    prompt = tuple(number * number % 61 for number in range(61))
    holder = PeerRig("holder", 128)
    holder.run("all of it", prompt)
    rig = Rig(HistoryModel(), 72, model_digest=KEY.model_digest)  # type: ignore[arg-type]
    rig.engine._scheduler.hooks.prefill_rate = lambda: 5.0
    memory = open_memory(rig.engine.kv_cache)
    limits = DiskLimits(size_bytes=8 << 20, segment_bytes=16 * SLOT_BYTES, cold_share=0.5)
    disk = DiskTier(tmp_path, KEY, memory, BLOCK_SIZE, limits)
    peers = PeerSource(
        replace(holder.terms, memory=open_memory(rig.engine.kv_cache)),
        BLOCK_SIZE,
        counters=Counters(BLOCK_SIZE, "peer"),
    )
    peers._usual.observe(SLOT_BYTES, 0.5)  # it is slow, and sooner than computing
    sink = SinkFanout([disk], most_kept=5)
    desk = rig.engine.open_desk(CombinedTier([disk, peers], sink), cold_blocks=73, fence=memory.fence)
    sink.bind(desk)
    peers.bind(desk)
    disk.start()
    peers.start()
    wait_until(lambda: disk.health.on)
    rig.run("its beginning", prompt[:25])
    assert disk.flush(5.0)
    rig.engine._send(lambda: rig.engine._scheduler.blocks.free_newest(8))
    rig.submit("all of it", prompt, kv_source=holder.kv, kv_source_tokens=60)
    rig.wait()
    assert rig.out.tokens("all of it") == greedy_answer(prompt, 8)
    assert rig.out.last("all of it").num_cached_tokens == 60
    assert disk.stats().tokens_read >= 24
    assert peers.stats().tokens_read == 60 - disk.stats().tokens_read
    peers.close()
    disk.close()
    rig.close()
    holder.close()
