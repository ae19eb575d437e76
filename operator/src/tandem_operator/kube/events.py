"""Why StatefulSets cannot create pods: their status does not say, Kubernetes' Events about them do.

They are watched, and kept by the uid of the StatefulSet, so that a look at a model asks the API server for none: it
would read every Event of the namespace to answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tandem_api.names import Role, workload_name

from tandem_operator.kube.store import Kept
from tandem_operator.objects.manifests import STATEFUL_SET, Kind, Manifest, ModelKey, dig

CREATIONS = {"fieldSelector": f"involvedObject.kind={STATEFUL_SET.name}"}
_REASONS = frozenset({"FailedCreate", "SuccessfulCreate"})
_SUFFIXES = tuple(workload_name("", role) for role in (Role.PREFILL, Role.DECODE))
_MESSAGE_MAX = 1024


class CreationEvents:
    """The Events about creating pods that there are. Not thread-safe: it belongs to one event loop."""

    def __init__(self) -> None:
        self._events: defaultdict[str, dict[tuple[ModelKey, str], Manifest]] = defaultdict(dict)

    def failure(self, uid: str) -> str | None:
        """Why the StatefulSet of this uid cannot create pods; None when it can."""
        return creation_failure(self._events.get(uid, {}).values())

    def put(self, kind: Kind, manifest: Manifest) -> Kept | None:
        """Keep an Event, of the model whose StatefulSet it may be about."""
        del kind  # there is one
        model, uid = _model_of(manifest), str(dig(manifest, "involvedObject", "uid"))
        if model is None or manifest.get("reason") not in _REASONS:
            return None
        before = self.failure(uid)
        self._events[uid][model, manifest["metadata"]["name"]] = {
            "reason": manifest["reason"],
            "message": str(manifest.get("message"))[:_MESSAGE_MAX],
            "lastTimestamp": manifest.get("lastTimestamp") or manifest.get("eventTime"),
        }
        return Kept(model, is_news=self.failure(uid) != before)

    def remove(self, kind: Kind, manifest: Manifest) -> ModelKey | None:
        """Forget an Event that has run out."""
        del kind
        model, uid = _model_of(manifest), str(dig(manifest, "involvedObject", "uid"))
        if model is None or uid not in self._events:
            return None
        self._events[uid].pop((model, manifest["metadata"]["name"]), None)
        if not self._events[uid]:
            del self._events[uid]
        return model

    def retain(self, kind: Kind, namespace: str | None, present: Iterable[tuple[ModelKey, str]]) -> set[ModelKey]:
        """Forget what a complete list did not have."""
        del kind
        alive = set(present)
        gone: set[ModelKey] = set()
        for uid, events in list(self._events.items()):
            for key in [key for key in events if key not in alive and namespace in (None, key[0].namespace)]:
                del events[key]
                gone.add(key[0])
            if not events:
                del self._events[uid]
        return gone


def _model_of(event: Manifest) -> ModelKey | None:
    """The model that the name of the StatefulSet tells; whether it is the model's own shows its uid."""
    name = str(dig(event, "involvedObject", "name"))
    suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
    return None if suffix is None else ModelKey(event["metadata"]["namespace"], name.removesuffix(suffix))


def creation_failure(events: Iterable[Manifest]) -> str | None:
    """Why a workload could not create a pod, by the Events about it; None when it has since created one."""
    outcomes = [event for event in events if event.get("reason") in ("FailedCreate", "SuccessfulCreate")]
    # Times are whole seconds: of two in one, the failure is what is still open.
    last = max(
        outcomes, key=lambda event: (str(event.get("lastTimestamp")), event["reason"] == "FailedCreate"), default=None
    )
    return None if last is None or last["reason"] == "SuccessfulCreate" else str(last.get("message"))
