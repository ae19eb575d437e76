"""Keeps the Secret with a model's keys: makes it, rotates what is in it, and never gives a key to anybody else.

It is read by its name whenever the model is looked at, and never listed or watched, so that the operator need not be
allowed to see other Secrets than those it asks for. Every write is bound to the version that was read.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem_api.keys import KEY_BYTES, MAX_KEY_ID

from tandem_operator.children.plan import ChildStep, plan_step
from tandem_operator.keys.rotation import KeyPolicy, KeyRotation, KeyState, KeyStep, NewKey, plan_rotation
from tandem_operator.keys.secret import build_keys, read_keys, write_keys
from tandem_operator.kube.client import KubeClient, object_path
from tandem_operator.objects.errors import ForbiddenError, NamespaceEndingError, RejectedError, UnreadableKeysError
from tandem_operator.objects.happening import Happening
from tandem_operator.objects.manifests import SECRET, ChildKey, Manifest, child_key
from tandem_operator.objects.problem import Problem
from tandem_operator.objects.refusals import refusal
from tandem_operator.runtime import metrics
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.keys import KEY_FILES

_ROTATING = "RotatingKeys"
_KEY_STEPS = {
    KeyStep.ADDED: (_ROTATING, "1 of 3: new keys stand beside the old ones"),
    KeyStep.PROMOTED: (_ROTATING, "2 of 3: pods speak with the new keys, the old ones are still accepted"),
    KeyStep.RETIRED: ("KeysRotated", "3 of 3: the old keys are removed"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLook:
    """What a look at a model's keys came to."""

    problem: Problem | None = None
    taken: tuple[ChildKey, ...] = ()
    """The Secret, where it belongs to somebody else."""
    waiting: tuple[ChildKey, ...] = ()
    """The Secret, where it is of an earlier model of this name and will be gone soon."""
    happening: Happening | None = None
    look_after_seconds: float | None = None
    usable: bool = True
    """Pods may be made: they find keys, and keep them."""


class KeyKeeper:
    def __init__(self, client: KubeClient, policy: KeyPolicy, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._policy = policy
        self._clock = clock

    async def ensure(self, blueprint: Blueprint, request: str | None) -> KeyLook:
        """See to one model's keys. `request` is the wish to rotate that its object carries.

        Raises:
            APIError: something that time may heal, a write by somebody else in this moment included.
        """
        desired = build_keys(blueprint)
        state: KeyState | None = None
        key, path = child_key(desired), object_path(SECRET, desired)
        try:
            live = await self._client.find(path)
            step = plan_step(desired, live, owner_uid=blueprint.model.metadata.uid)
            if step is ChildStep.WAIT:
                return KeyLook(waiting=(key,), usable=False)
            if step is ChildStep.TAKEN:
                return KeyLook(taken=(key,), usable=False)
            state = None if live is None else read_keys(live)
            rotation = self._plan(state, request)
            if (write := rotation.write or (state if step is ChildStep.APPLY else None)) is not None:
                await self._write(write_keys(desired, live, write), is_new=live is None)
        except UnreadableKeysError as error:
            return KeyLook(problem=Problem(reason="KeysUnreadable", message=str(error), stalled=True), usable=False)
        except NamespaceEndingError:
            raise  # not a refusal: everything here is about to go
        except (RejectedError, ForbiddenError) as error:
            return KeyLook(problem=refusal(str(key), error), usable=state is not None)
        happening = None if rotation.step is None else keys_happening(key, rotation.step, self._policy.settle_seconds)
        return KeyLook(happening=happening, look_after_seconds=rotation.look_after_seconds)

    def _plan(self, state: KeyState | None, request: str | None) -> KeyRotation:
        fresh = {
            file: NewKey(name=secrets.token_hex(MAX_KEY_ID // 2), key=secrets.token_bytes(KEY_BYTES))
            for file in KEY_FILES
        }
        return plan_rotation(state, request=request, now=self._clock(), fresh=fresh, policy=self._policy)

    async def _write(self, secret: Manifest, *, is_new: bool) -> None:
        if is_new:
            await self._client.create(SECRET.path(secret["metadata"]["namespace"]), secret)
        else:
            await self._client.replace(object_path(SECRET, secret), secret)
        metrics.WRITES.labels("create" if is_new else "replace", SECRET.name).inc()


def keys_happening(secret: ChildKey, step: KeyStep, settle_seconds: float) -> Happening:
    """The Event of one step that a model's keys took."""
    if step is KeyStep.MADE:
        return Happening(reason="KeysMade", message=f"made new keys in {secret}")
    reason, text = _KEY_STEPS[step]
    rest = "" if step is KeyStep.RETIRED else f"; the next step follows after {settle_seconds:g} s"
    return Happening(reason=reason, message=f"{secret}: {text}{rest}")
