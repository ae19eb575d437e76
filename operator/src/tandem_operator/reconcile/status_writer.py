"""Writes the status of models, and the Events that a change of it deserves: when it says something new, and as rarely
as counts allow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_api.crd.status import InferenceModelStatus

from tandem_operator.kube.client import KubeClient
from tandem_operator.kube.recorder import EventRecorder
from tandem_operator.objects.errors import NotFoundError
from tandem_operator.objects.happening import Happening
from tandem_operator.objects.manifests import INFERENCE_MODEL, ChildKey, Manifest, ModelKey, dig
from tandem_operator.objects.parsing import parse_status
from tandem_operator.reconcile.claims import Claims
from tandem_operator.reconcile.contention import Contention, last_writer
from tandem_operator.reconcile.look import Look
from tandem_operator.reconcile.status import is_same_but_counts, is_same_memory, known_conditions, true_conditions
from tandem_operator.reconcile.transitions import status_happenings
from tandem_operator.runtime import metrics
from tandem_operator.workloads.blueprint import digest

STATUS_SECONDS = 1.0
_STATUS = ChildKey(INFERENCE_MODEL.name, "status")
"""The status of the model itself, as `Contention` has it."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A status that was written."""

    at: float
    """Time of the monotonic clock."""
    version: str | None
    """The resourceVersion that came of it; None where the next look may decide otherwise for it."""
    content: str
    """Digest of the status as the API server keeps it."""


class StatusWriter:
    """Remembers what was written last, so that the operator's own writes cause no looks."""

    def __init__(
        self,
        client: KubeClient,
        recorder: EventRecorder,
        claims: Claims,
        contention: Contention,
        *,
        status_seconds: float = STATUS_SECONDS,
    ) -> None:
        """`status_seconds` is how long a status stays that has nothing to say but other counts."""
        self._client = client
        self._recorder = recorder
        self._claims = claims
        self._contention = contention
        self._status_seconds = status_seconds
        self._written: dict[ModelKey, _Written] = {}
        self._foreign: dict[ModelKey, str] = {}
        """Models whose status somebody else has written since it was written here, and who."""

    async def report(self, look: Look, status: InferenceModelStatus, happenings: Sequence[Happening]) -> float | None:
        """Write the status if it says something new, and the Events that belong to it. Returns seconds after which to
        do so, where other counts can wait: pods that come up together are told together."""
        key = look.key
        metrics.note_conditions(key, true_conditions(status), known_conditions(status))
        before = parse_status(look.raw)
        status = status.model_copy(update={"operator": self._claims.claim})
        wait = self._wait(key, before, status)
        if wait > 0:
            status = before
        elif status != before:
            if not await self.write(look, status):
                return None
            if (foreign := self._foreign.pop(key, None)) is not None:
                self._contention.note(key, _STATUS, _STATUS.name, writer=foreign)
        told = (*happenings, *status_happenings(before, status))
        await asyncio.gather(*(self._recorder.record(key, look.uid, happening) for happening in told))
        return wait if wait > 0 else None

    def _wait(self, key: ModelKey, before: InferenceModelStatus, status: InferenceModelStatus) -> float:
        """Seconds until this status may be written; 0 or below: now."""
        if status == before:
            return 0.0
        wait, written = 0.0, self._written.get(key)
        if written is not None and is_same_but_counts(before, status):
            wait = written.at + self._status_seconds - time.monotonic()
        if key in self._foreign:
            wait = max(wait, self._contention.wait(key, _STATUS, _STATUS.name))
        return wait

    async def write(self, look: Look, status: InferenceModelStatus) -> bool:
        """False where the model is gone."""
        key, raw = look.key, look.raw
        body: Manifest = {
            "apiVersion": INFERENCE_MODEL.api_version,
            "kind": INFERENCE_MODEL.name,
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": look.uid},
            "status": status.model_dump(by_alias=True, exclude_none=True),
        }
        if status.operator is not None and status.operator != parse_status(raw).operator:
            # A claim is one operator's: of two that make it at a time, one finds that the object has changed.
            body["metadata"]["resourceVersion"] = str(raw["metadata"]["resourceVersion"])
        try:
            answer = await self._client.apply(
                INFERENCE_MODEL.path(key.namespace, key.name, subresource="status"), body, force=True
            )
        except NotFoundError:
            return False
        # What somebody changed since the model was read is in this version too, and a watch that was away in between
        # tells of nothing else.
        is_known = is_same_memory(parse_status(raw), status) and _requested(answer) == _requested(raw)
        version = str(dig(answer, "metadata", "resourceVersion")) if is_known else None
        self._written[key] = _Written(at=time.monotonic(), version=version, content=_brief(answer.get("status")))
        metrics.WRITES.labels("status", INFERENCE_MODEL.name).inc()
        return True

    def has_written(self, key: ModelKey, version: str) -> bool:
        """Whether this version of the object is what came of the last status that was written: no reason to look."""
        written = self._written.get(key)
        return written is not None and written.version == version

    def notice_foreign(self, key: ModelKey, raw: Manifest) -> None:
        """Notice who has written the status since it was written here."""
        written = self._written.get(key)
        if written is not None and written.content != _brief(raw.get("status")):
            self._foreign[key] = last_writer(raw, subresource="status")

    def forget(self, key: ModelKey) -> None:
        """The model is gone, or somebody else's."""
        self._foreign.pop(key, None)
        self._written.pop(key, None)


def _requested(raw: Manifest) -> tuple[object, ...]:
    """Equal where nobody has changed what a look goes by, but for the status."""
    return tuple(dig(raw, "metadata", each) for each in ("generation", "annotations", "labels", "deletionTimestamp"))


def _brief(content: object) -> str:
    return digest(content)[:16]
