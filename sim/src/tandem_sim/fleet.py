"""The replicas of one role: ordered, warming, ready, draining, gone; and what they cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tandem_sim.workers import DecodeWorker, PrefillWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Seconds from ordering a replica to its first request: triangular around `seconds`."""

    seconds: float = 45.0
    spread: float = 0.15
    """Share of `seconds`, to either side."""

    def draw(self, chance: random.Random) -> float:
        return self.seconds * (1 + self.spread * (chance.random() + chance.random() - 1))


AnyWorker = PrefillWorker | DecodeWorker


class RolePool:
    """One role as a StatefulSet has it: the newest replica goes first, and drains before it is gone."""

    def __init__(self, build: Callable[[str, float], AnyWorker], name: str, start_up: StartUp, seed: int) -> None:
        self._build = build
        self._name = name
        self._start_up = start_up
        self._chance = random.Random(seed)
        self._count = 0
        self.members: list[AnyWorker] = []
        """Asked for, the oldest first: warming and ready."""
        self.draining: list[AnyWorker] = []
        self.past: list[AnyWorker] = []
        self._earlier = random.Random(~seed)
        self.starts: list[float] = []
        """Seconds that replicas took, in the order in which they became ready."""
        self.orders: list[tuple[float, int]] = []
        """When the wanted number changed, and to what."""

    def set_replicas(self, wanted: int, now: float, *, warm: bool = False) -> tuple[list[AnyWorker], list[AnyWorker]]:
        """Order or release replicas. Returns those ordered, with `ready_at` set, and those that drain from now on."""
        if not self.orders or self.orders[-1][1] != wanted:
            self.orders.append((now, wanted))
        ordered: list[AnyWorker] = []
        leaving: list[AnyWorker] = []
        while len(self.members) < wanted:
            worker = self._build(f"{self._name}-{self._count}", now)
            self._count += 1
            worker.ready_at = now if warm else now + self._start_up.draw(self._chance)
            self.members.append(worker)
            ordered.append(worker)
        while len(self.members) > wanted:
            worker = self.members.pop()
            if worker.state == "warming":
                self.retire(worker, now)
            else:
                worker.state = "draining"
                self.draining.append(worker)
                leaving.append(worker)
        return ordered, leaving

    def admit(self, worker: AnyWorker, now: float) -> None:
        worker.state = "ready"
        if now > worker.ordered_at:
            self.starts.append(now - worker.ordered_at)

    def recall_starts(self, count: int) -> None:
        """Those that are there at the beginning have started before, and pods tell how long that took."""
        self.starts += [self._start_up.draw(self._earlier) for _ in range(count)]

    def replace(self, worker: AnyWorker, now: float) -> AnyWorker:
        """A replica is lost; another one takes its place after a start-up."""
        place = self.members.index(worker)
        fresh = self._build(f"{self._name}-{self._count}", now)
        self._count += 1
        fresh.ready_at = now + self._start_up.draw(self._chance)
        self.members[place] = fresh
        self.retire(worker, now)
        return fresh

    def retire_drained(self, worker: AnyWorker, now: float) -> None:
        """A replica that is to go, and has nothing to do any more, goes."""
        if worker.state != "draining":
            return
        idle = len(worker) == 0 if isinstance(worker, PrefillWorker) else worker.kv_reserved == 0
        if idle:
            self.retire(worker, now)

    def retire(self, worker: AnyWorker, now: float) -> None:
        worker.state = "gone"
        worker.gone_at = now
        worker.version += 1
        if worker in self.draining:
            self.draining.remove(worker)
        self.past.append(worker)

    @property
    def ready(self) -> list[AnyWorker]:
        return [worker for worker in self.members if worker.state == "ready"]

    def gpu_seconds(self, until: float) -> float:
        """Time of every replica from its order to its end, start-up and drain included."""
        return sum(
            (min(worker.gone_at, until) - worker.ordered_at) * worker.profile.gpus
            for worker in (*self.past, *self.draining, *self.members)
            if worker.ordered_at < until
        )
