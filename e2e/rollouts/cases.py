"""Which rollouts are made, in which order, of which models. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import cycle, islice, product

from e2e.suite.fleet import Object, smollm2

REPOSITORY = "tandem-e2e/moving-smollm2"
SPACE = {"memory": "128Mi"}
"""Of each rank: nearly 3,000 tokens even where it holds every head of every layer."""


class ChangeKind(StrEnum):
    """What is changed, or what happens in the middle of a change."""

    IMAGE = "image"
    COMMIT = "commit"
    PARALLELISM = "parallelism"
    SETTING = "setting"
    ROLLBACK = "rollback"
    KILLED = "killed"
    PAUSED = "paused"
    CANARY = "canary"


TITLES = {
    ChangeKind.IMAGE: "image",
    ChangeKind.COMMIT: "model commit",
    ChangeKind.PARALLELISM: "parallelism",
    ChangeKind.SETTING: "engine setting",
    ChangeKind.ROLLBACK: "rolled back midway",
    ChangeKind.KILLED: "operator killed midway",
    ChangeKind.PAUSED: "paused and resumed",
    ChangeKind.CANARY: "canary that fails",
}


@dataclass(frozen=True, slots=True)
class FleetShape:
    """Replicas of both roles; `nodes` pods for each replica of the decode role."""

    name: str
    prefill: int
    decode: int
    nodes: int = 1

    @property
    def promise(self) -> Fraction:
        """Share of the model's capacity that serves throughout: by default a single replica is surged, and one of
        several may be missing."""
        return min(Fraction(n - (n > 1), n) for n in (self.prefill, self.decode))

    @property
    def wanted(self) -> dict[str, int]:
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def pods(self) -> dict[str, int]:
        return {"prefill": self.prefill, "decode": self.decode * self.nodes}


SHAPES = {
    shape.name: shape
    for shape in (FleetShape("1+1", 1, 1), FleetShape("2+4", 2, 4), FleetShape("group", 1, 1, nodes=2))
}


def widths(shape: FleetShape) -> tuple[str, int, int]:
    """The role whose pipeline another parallelism changes, and its two lengths: as few processes as show it."""
    if shape.nodes > 1:
        return "decode", shape.nodes, 2 * shape.nodes
    return ("prefill" if shape.decode > 1 else "decode"), 1, 2


def manifest(shape: FleetShape, name: str, image: str) -> Object:
    """The model before anything is changed. It names its image: only so can another one be named."""
    made = smollm2(name, prefill=shape.prefill, decode=shape.decode, kv=SPACE)
    spec = made["spec"]
    spec["model"]["uri"] = f"hf://{REPOSITORY}"
    spec["engine"] = spec["engine"] | {"image": image}
    for role in ("prefill", "decode"):
        spec[role] = spec[role] | {"resources": {"requests": {"cpu": "20m", "memory": "700Mi"}}}
    if shape.nodes > 1:
        spec["decode"] |= {"nodesPerReplica": shape.nodes, "parallelism": {"pipeline": shape.nodes}}
    return made


@dataclass(frozen=True, slots=True)
class RolloutCase:
    """One rollout. `number` counts from 1."""

    number: int
    shape: str
    kind: ChangeKind


def plan_cases(count: int, shapes: Sequence[str], kinds: Sequence[ChangeKind]) -> list[RolloutCase]:
    """All kinds of one shape, then of the next one, and again from the beginning."""
    pairs: Iterator[tuple[str, ChangeKind]] = cycle(product(shapes, kinds))
    return [RolloutCase(number, shape, kind) for number, (shape, kind) in enumerate(islice(pairs, count), start=1)]


def missing_cases(cases: Sequence[RolloutCase], done: Sequence[tuple[str, str]]) -> list[RolloutCase]:
    """Those that are not among the shapes and kinds of earlier runs; each of these stands for one case."""
    left = list(done)
    found: list[RolloutCase] = []
    for case in cases:
        key = (case.shape, case.kind.value)
        if key in left:
            left.remove(key)
        else:
            found.append(case)
    return found
