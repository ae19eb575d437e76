"""What a killed process leaves on disk, and what the next one believes of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.host.files.layout import Layout, SharedFile
from tandem_worker.model.sources.swarm.parts import PartFiles
from tandem_worker.model.sources.swarm.plan import HUB, Plan
from xxhash import xxh3_128_digest

CONTENT = random.Random(3).randbytes(3 * (1 << 20) + 17)
LAYOUT = Layout("org/model", "c" * 40, [SharedFile("w", len(CONTENT), "d" * 64)])


def chunk(index: int) -> bytes:
    found = LAYOUT.chunk(index)
    return CONTENT[found.offset : found.offset + found.size]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def leave(folder: Path, *indices: int) -> PartFiles:
    """What a process that ended after these chunks leaves."""
    parts = PartFiles(LAYOUT, folder)
    assert list(parts.resume(0)) == []
    for index in indices:
        parts.write(index, chunk(index), xxh3_128_digest(chunk(index)))
    parts.close()
    return parts


@pytest.mark.parametrize(
    ("damage", "believed"),
    [
        (lambda part, sums: None, {0, 1, 3}),
        (lambda part, sums: flip(part, 5), {1, 3}),
        (lambda part, sums: flip(sums, 16), {0, 3}),
        (lambda part, sums: os.truncate(part, (1 << 20) + 9), {0}),
        (lambda part, sums: os.truncate(sums, 20), {0}),
        (lambda part, sums: sums.unlink(), set()),
        (lambda part, sums: part.unlink(), set()),
    ],
)
def test_only_chunks_whose_sum_is_right_are_believed(
    tmp_path: Path, damage: Callable[[Path, Path], None], believed: set[int]
) -> None:
    part = leave(tmp_path, 0, 1, 3).part(0)
    damage(part, part.with_suffix(".sums"))
    parts = PartFiles(LAYOUT, tmp_path)
    assert {index for index, _ in parts.resume(0)} == believed
    for index in set(range(LAYOUT.num_chunks)) - believed:
        parts.write(index, chunk(index), xxh3_128_digest(chunk(index)))
    parts.close()
    assert part.read_bytes() == CONTENT


def test_after_the_end_nothing_is_written_and_no_descriptor_is_left(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    parts = leave(tmp_path, 0)
    parts.write(1, chunk(1), xxh3_128_digest(chunk(1)))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not any(parts.part(0).read_bytes()[1 << 20 : 2 << 20])


WIDE = Layout("org/model", "c" * 40, [SharedFile("a", 40 << 20, "d" * 64), SharedFile("b", 9, "e" * 64)])


@given(honest=st.integers(0, 3), liars=st.integers(0, 2), seed=st.integers(0, 1 << 16))
def test_every_plan_ends_with_the_hubs_bytes_whatever_peers_tell(honest: int, liars: int, seed: int) -> None:
    """Peers tell of any chunks, lie in any of them, and leave at any time; only right files are sealed."""
    right = {index: index.to_bytes(16, "big", signed=False)[:-1] + b"\x01" for index in range(WIDE.num_chunks)}
    wrong = {index: digest[:-1] + b"\x02" for index, digest in right.items()}
    plan, told = Plan(WIDE, "0" * 16, seed), dict[str, dict[int, bytes]]()
    rand = random.Random(seed)
    for number in range(honest + liars):
        some = rand.sample(range(WIDE.num_chunks), rand.randrange(WIDE.num_chunks + 1))
        told[f"p {number}"] = {i: wrong[i] if number >= honest and rand.random() < 0.5 else right[i] for i in some}
    for name, claims in told.items():
        plan.observe(name, name[2:] * 16, claims.items(), 0.0)
    present, banned, now = list(told), set[str](), 0.0
    sealed = set[int]()
    for _ in range(2000):
        now += 1.0
        if len(sealed) == 2:
            break
        if present and rand.random() < 0.02:
            plan.forget(present.pop())
        for name in [n for n in present if n not in banned]:
            if (index := plan.next_from_peer(name)) is not None:
                assert plan.accepts(index, name)
                banned.update(plan.done(index, told[name][index], name, now))
        for index in plan.next_from_hub(now):
            banned.update(plan.done(index, right[index], HUB, now))
        for file in {0, 1} - sealed:
            if plan.is_complete(file):
                if all(plan.sums[i] == right[i] for i in WIDE.chunks_of(file)):
                    banned.update(plan.seal(file))
                    sealed.add(file)
                else:
                    assert plan.reject(file)
    assert sealed == {0, 1}
    assert not banned & {f"p {number}" for number in range(honest)}
