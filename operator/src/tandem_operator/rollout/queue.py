"""The queue of models that have something to roll: only so many have a slot at a time.

The slots that were given are in the models' statuses: an operator that starts reads them before it gives new ones. A
model that is stalled keeps its slot, so that it can go on, and is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem_api.crd.status import InferenceModelStatus

from tandem_operator.objects.manifests import ModelKey

_MOVING = ("Progressing", "Preparing", "Canary")


def next_in_queue(rolling: int, waiting: Mapping[ModelKey, str], *, limit: int) -> list[ModelKey]:
    """Who may begin now: those that have waited longest. `waiting` has the time since when."""
    ordered = sorted(waiting, key=lambda key: (waiting[key], key))
    return ordered[: max(0, limit - rolling)]


def has_slot(status: InferenceModelStatus) -> bool:
    """Whether a model was rolling when this status was written."""
    state = status.rollout
    return state is not None and state.phase in _MOVING and not state.waiting


def is_stalled(status: InferenceModelStatus) -> bool:
    return any(condition.type == "Stalled" for condition in status.conditions)


@dataclass(slots=True)
class RolloutQueue:
    """The slots of one operator, and who waits for one."""

    limit: int = 0
    """Models that may roll at a time; 0: any number."""
    _rolling: dict[ModelKey, bool] = field(default_factory=dict[ModelKey, bool])
    """Those that have a slot, and whether they count."""
    _waiting: dict[ModelKey, str] = field(default_factory=dict[ModelKey, str])

    def remember(self, key: ModelKey, status: InferenceModelStatus) -> None:
        """Take over what an operator before has given."""
        if has_slot(status):
            self._rolling[key] = not is_stalled(status)
        elif status.rollout is not None and status.rollout.waiting:
            self._waiting[key] = status.rollout.since

    def request_slot(self, key: ModelKey, *, since: str) -> bool:
        """Whether this model may roll now: it has a slot, or gets one. It waits since `since`."""
        if not self.limit or key in self._rolling:
            return True
        self._waiting.setdefault(key, since)
        if key not in next_in_queue(sum(self._rolling.values()), self._waiting, limit=self.limit):
            return False
        del self._waiting[key]
        self._rolling[key] = True
        return True

    def set_stalled(self, key: ModelKey, *, stalled: bool) -> None:
        """A model that is stalled moves nothing: others may."""
        if key in self._rolling:
            self._rolling[key] = not stalled

    def stop_waiting(self, key: ModelKey) -> None:
        """This model cannot be looked at now: the others do not wait for it to take its slot. It asks again."""
        self._waiting.pop(key, None)

    def release_slot(self, key: ModelKey) -> None:
        """This model does not roll, or is gone."""
        self._rolling.pop(key, None)
        self._waiting.pop(key, None)
