"""The rotation of keys: each step by itself, and pods that see every write a little later than it was made."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.keys import KEY_BYTES, KeyRing
from tandem_operator.keys.rotation import KeyPolicy, KeyState, KeyStep, NewKey, plan_rotation

SETTLE = 180.0
POLICY = KeyPolicy(settle_seconds=SETTLE)
FILES = ("peers.json", "api.json")
_serial = itertools.count()


def fresh() -> dict[str, NewKey]:
    return {file: NewKey(name=f"k{next(_serial)}", key=bytes(KEY_BYTES)) for file in FILES}


def ring(*names: str, primary: str) -> KeyRing:
    return KeyRing(primary=primary, keys={name: bytes(KEY_BYTES) for name in names})


def state(*names: str, primary: str, since: float | None = 0.0, request: str | None = None) -> KeyState:
    rings = {file: ring(*names, primary=primary) for file in FILES}
    return KeyState(rings=rings, step=KeyStep.MADE, since=since, request=request)


def step(
    before: KeyState | None, now: float, request: str | None = None, policy: KeyPolicy = POLICY
) -> tuple[KeyStep | None, KeyState | None, float | None]:
    found = plan_rotation(before, request=request, now=now, fresh=fresh(), policy=policy)
    return found.step, found.write, found.look_after_seconds


def shape(found: KeyState | None) -> tuple[int, bool]:
    """Keys of a ring, and whether it speaks with the newest."""
    assert found is not None
    (only,) = {(len(r.keys), r.primary == list(r.keys)[-1]) for r in found.rings.values()}
    return only


def test_absent_keys_are_made_and_answer_the_wish_that_is_there() -> None:
    taken, made, wait = step(None, 5.0, request="first")
    assert (taken, wait) == (KeyStep.MADE, None)
    assert made is not None
    assert (made.since, made.request, shape(made)) == (5.0, "first", (1, True))
    assert step(made, 1e9, request="first") == (None, None, None)


def test_a_rotation_takes_three_steps_and_ends() -> None:
    now, steps, shapes = 1000.0, [], []
    current = state("a", primary="a")
    for _ in range(3):
        taken, written, wait = step(current, now, request="go")
        assert written is not None
        steps.append(taken)
        shapes.append(shape(written))
        assert (written.since, wait) == (now, SETTLE)
        assert step(written, now + SETTLE - 1, request="go")[1] is None or taken is KeyStep.RETIRED
        current, now = written, now + SETTLE
    assert steps == [KeyStep.ADDED, KeyStep.PROMOTED, KeyStep.RETIRED]
    assert shapes == [(2, False), (2, True), (1, True)]
    assert "a" not in current.rings["api.json"].keys
    assert step(current, now + 1e6, request="go") == (None, None, None)


@pytest.mark.parametrize(("old", "new", "starts"), [(None, "x", True), ("x", "y", True), ("x", "x", False)])
def test_only_another_wish_starts_a_rotation(old: str | None, new: str, starts: bool) -> None:
    taken, written, _ = step(state("a", primary="a", request=old), 1e6, request=new)
    assert (taken is KeyStep.ADDED) == starts
    assert written is None or written.request == new


def test_a_wish_that_is_taken_back_is_none() -> None:
    assert step(state("a", primary="a", request="x"), 1e6, request=None)[0] is None


def test_a_wish_during_a_rotation_starts_the_next_one_after_it() -> None:
    taken, written, _ = step(state("a", "b", primary="a", request="x"), 1e6, request="y")
    assert taken is KeyStep.PROMOTED
    assert written is not None
    assert written.request == "x"


def test_keys_rotate_by_age_only_where_told_to() -> None:
    aged = KeyPolicy(settle_seconds=SETTLE, rotate_after_seconds=1000.0)
    settled = state("a", primary="a", request="x")
    assert step(settled, 900.0, request="x", policy=aged) == (None, None, 100.0)
    taken, written, _ = step(settled, 1000.0, policy=aged)
    assert taken is KeyStep.ADDED
    assert written is not None
    assert written.request == "x", "a wish that was answered stays answered"
    assert step(settled, 1e9, request="x")[0] is None


def test_keys_younger_than_the_settling_time_wait_whatever_is_asked() -> None:
    aged = KeyPolicy(settle_seconds=SETTLE, rotate_after_seconds=1.0)
    assert step(state("a", primary="a"), 60.0, policy=aged) == (None, None, SETTLE - 60.0)
    assert step(state("a", primary="a"), 60.0, request="now") == (None, None, SETTLE - 60.0)


@pytest.mark.parametrize("since", [None, 2000.0])
def test_a_time_that_nobody_knows_counts_from_now(since: float | None) -> None:
    """The annotation was edited or lost, or the clock was set back."""
    taken, written, wait = step(state("a", "b", primary="a", since=since), 1000.0)
    assert (taken, wait) == (None, SETTLE)
    assert written == state("a", "b", primary="a", since=1000.0)


def test_rings_that_were_left_at_different_steps_meet_again() -> None:
    mixed = replace(state("a", primary="a"), rings={"peers.json": ring("a", "b", primary="a"),
                                                    "api.json": ring("c", "d", primary="d")})  # fmt: skip
    _, promoted, _ = step(mixed, 1e6)
    assert shape(promoted) == (2, True)
    assert promoted is not None
    _, retired, _ = step(promoted, 2e6)
    assert retired is not None
    assert [list(r.keys) for r in retired.rings.values()] == [["b"], ["d"]]


def test_three_keys_end_as_the_newest() -> None:
    """However a person left them."""
    current, now = state("a", "b", "c", primary="b"), 1e6
    for _ in range(2):
        _, written, _ = step(current, now)
        assert written is not None
        current, now = written, now + SETTLE
    assert list(current.rings["api.json"].keys) == ["c"]


looks = st.lists(
    st.tuples(st.floats(0.0, 2.5 * SETTLE), st.sampled_from([None, "x", "y", "z"])), min_size=2, max_size=25
)


def disagreements(
    looks: list[tuple[float, str | None]], delays: list[float], num_pods: int, policy: KeyPolicy
) -> list[str]:
    """Who could not speak with whom, in a run in which the operator looks when it likes and a pod reads each write
    after a delay of its own. `looks` are pauses between looks and the wish that is there then."""
    now, current = 0.0, None
    writes: list[tuple[float, KeyState]] = []
    for pause, request in looks:
        now += pause
        found = plan_rotation(current, request=request, now=now, fresh=fresh(), policy=policy)
        if found.write is not None:
            current = found.write
            writes.append((now, current))
    delay = itertools.cycle(delays)
    # Pods begin with the first write: without any they have not started.
    pods = [
        [(time + (next(delay) if index else 0.0), written) for index, (time, written) in enumerate(writes)]
        for _ in range(num_pods)
    ]
    refused: list[str] = []
    for moment in sorted({time for pod in pods for time, _ in pod}):
        views = [_view(pod, moment) for pod in pods]
        for file, (speaker, listener) in itertools.product(FILES, itertools.product(views, repeat=2)):
            if speaker.rings[file].primary not in listener.rings[file].keys:
                refused.append(f"{file} at {moment}: {speaker} to {listener}")
    return refused


def _view(arrivals: list[tuple[float, KeyState]], moment: float) -> KeyState:
    """The newest write that has arrived: a mount never goes back."""
    return [written for time, written in arrivals if time <= moment][-1]


@given(
    looks=looks, delays=st.lists(st.floats(0.0, SETTLE * 0.999), min_size=8, max_size=40), num_pods=st.integers(2, 5)
)
def test_at_every_moment_every_pod_can_speak_with_every_other(
    looks: list[tuple[float, str | None]], delays: list[float], num_pods: int
) -> None:
    policy = KeyPolicy(settle_seconds=SETTLE, rotate_after_seconds=3 * SETTLE)
    assert disagreements(looks, delays, num_pods, policy) == []


def test_steps_faster_than_the_delays_would_part_the_pods() -> None:
    """The property above can fail: it does where steps do not wait for every pod."""
    hasty = KeyPolicy(settle_seconds=1.0)
    looks: list[tuple[float, str | None]] = [(0.0, None), *[(2.0, "x")] * 6]
    assert disagreements(looks, [0.0] * 3 + [100.0] * 3, 2, hasty)
    assert not disagreements(looks, [0.0, 0.9], 2, hasty)
