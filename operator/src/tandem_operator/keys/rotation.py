"""When a model's keys are made and how they rotate: from the rings that are there, a wish and the time to the rings
that should be there next. Pure: the clock and the bytes of new keys come in as data.

A ring tells by itself how far it is, because its keys stand in the order in which they were added:

    one key, primary    ── add ──▶  old primary, new    ── promote ──▶  old, new primary    ── retire ──▶  one key

Invariant: two writes are at least `settle_seconds` apart, so while every pod reads a write within that time, all pods
see the last write or the one before it. Neighbours in the line above speak with a key that the other accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from tandem_api.keys import KeyRing


class KeyStep(StrEnum):
    """What was last done to the rings."""

    MADE = "Made"
    ADDED = "Added"
    PROMOTED = "Promoted"
    RETIRED = "Retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPolicy:
    settle_seconds: float = 180.0
    """Between two steps: what the kubelets take to bring a changed Secret into every pod, with room to spare."""
    rotate_after_seconds: float | None = None
    """Age at which keys rotate by themselves; None: only when somebody asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyState:
    """What is known of a model's keys."""

    rings: Mapping[str, KeyRing]
    """Rings by the file that holds them."""
    step: KeyStep | None
    since: float | None
    """Unix time of the last step; None where it cannot be read."""
    request: str | None
    """The wish to rotate that the newest keys answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key that nobody has yet."""

    name: str
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRotation:
    """What to do about the keys now."""

    step: KeyStep | None = None
    """The step that `write` takes; None: the rings stay as they are."""
    write: KeyState | None = None
    """The state to write; None: it is written already."""
    look_after_seconds: float | None
    """When to look again; None: nothing will be due."""


def plan_rotation(
    state: KeyState | None, *, request: str | None, now: float, fresh: Mapping[str, NewKey], policy: KeyPolicy
) -> KeyRotation:
    """What to do about the keys now.

    `state` is None where no keys are. `request` is the wish to rotate as it is written now, None without one; one that
    differs from the last that was answered starts a rotation. `fresh` has a new key for each file's ring.
    """
    if state is None:
        rings = {file: KeyRing(primary=new.name, keys={new.name: new.key}) for file, new in fresh.items()}
        made = KeyState(rings=rings, step=KeyStep.MADE, since=now, request=request)
        return KeyRotation(step=KeyStep.MADE, write=made, look_after_seconds=policy.rotate_after_seconds)
    if state.since is None or state.since > now:
        # Nobody can tell how long every pod has had these rings: that counts from now.
        return KeyRotation(write=replace(state, since=now), look_after_seconds=policy.settle_seconds)
    step = _next_step(state, request=request, age=now - state.since, policy=policy)
    if step is None:
        return KeyRotation(look_after_seconds=_until(policy.rotate_after_seconds, now - state.since))
    if now - state.since < policy.settle_seconds:
        return KeyRotation(look_after_seconds=policy.settle_seconds - (now - state.since))
    rings = {file: _STEPS[step](ring, fresh[file]) for file, ring in state.rings.items()}
    answered = request if step is KeyStep.ADDED and request is not None else state.request
    written = KeyState(rings=rings, step=step, since=now, request=answered)
    return KeyRotation(step=step, write=written, look_after_seconds=policy.settle_seconds)


def _next_step(state: KeyState, *, request: str | None, age: float, policy: KeyPolicy) -> KeyStep | None:
    """The step that is due once this state has settled. Rings that a person left at different steps meet again."""
    if any(ring.primary != _newest(ring) for ring in state.rings.values()):
        return KeyStep.PROMOTED
    if any(len(ring.keys) > 1 for ring in state.rings.values()):
        return KeyStep.RETIRED
    asked = request is not None and request != state.request
    aged = policy.rotate_after_seconds is not None and age >= policy.rotate_after_seconds
    return KeyStep.ADDED if asked or aged else None


def _newest(ring: KeyRing) -> str:
    return list(ring.keys)[-1]


def _add(ring: KeyRing, new: NewKey) -> KeyRing:
    assert new.name not in ring.keys
    return KeyRing(primary=ring.primary, keys={**ring.keys, new.name: new.key})


def _promote(ring: KeyRing, _: NewKey) -> KeyRing:
    return KeyRing(primary=_newest(ring), keys=ring.keys)


def _retire(ring: KeyRing, _: NewKey) -> KeyRing:
    return KeyRing(primary=ring.primary, keys={ring.primary: ring.keys[ring.primary]})


_STEPS = {KeyStep.ADDED: _add, KeyStep.PROMOTED: _promote, KeyStep.RETIRED: _retire}


def _until(limit: float | None, age: float) -> float | None:
    return None if limit is None else max(0.0, limit - age)
