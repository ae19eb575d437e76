"""Which Kubernetes Events a change deserves. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tandem_api.crd.status import Condition, InferenceModelStatus, ModelStatus, RolloutStatus

from tandem_operator.autoscale.plan.words import rested_by, scaled_by
from tandem_operator.objects.happening import Happening
from tandem_operator.objects.manifests import Children, Manifest, child_key, dig
from tandem_operator.observe.roles import STALLED_BY_REQUEST
from tandem_operator.reconcile.contention import CONTESTED
from tandem_operator.reconcile.status import UNDERSTOOD


def status_happenings(before: InferenceModelStatus, after: InferenceModelStatus) -> list[Happening]:
    """Events of conditions that changed."""
    old, new = _by_type(before), _by_type(after)
    events: list[Happening] = []
    stalled = new.get("Stalled")
    asked_for = stalled is not None and stalled.reason in STALLED_BY_REQUEST
    if stalled is not None and not asked_for and (stalled.reason, stalled.message) != _said(old.get("Stalled")):
        events.append(Happening(kind="Warning", reason=stalled.reason, message=stalled.message))
    if stalled is None and "Stalled" in old and old["Stalled"].reason not in STALLED_BY_REQUEST:
        events.append(Happening(reason="Recovered", message=f"no longer stalled: {old['Stalled'].reason}"))
    unread, unread_before = new.get(UNDERSTOOD), old.get(UNDERSTOOD)
    if unread is not None and _said(unread) != _said(unread_before):
        events.append(Happening(kind="Warning", reason=unread.reason, message=unread.message))
    if unread is None and unread_before is not None and stalled is None:
        events.append(Happening(reason=UNDERSTOOD, message="this operator knows every field of the spec"))
    if (contested := new.get(CONTESTED)) is not None and CONTESTED not in old:
        # Who writes the status too takes the condition away, and leaves this.
        events.append(Happening(kind="Warning", reason=CONTESTED, message=contested.message))
    for kind, reason in (("ModelReady", "ModelLoaded"), ("Ready", "Ready")):
        if _is_true(new.get(kind)) and not _is_true(old.get(kind)):
            events.append(Happening(reason=reason, message=new[kind].message))
    ready, was = new.get("Ready"), old.get("Ready")
    if ready is not None and ready.reason == "Suspended" and (was is None or was.reason != "Suspended"):
        events.append(Happening(reason="Suspended", message="scaling every pod of this model to zero"))
    scaled = [Happening(reason="Autoscaled", message=text) for text in scaled_by(before.scaling, after.scaling)]
    weights = [*_weights(before.model, after.model), *_weights(before.draft, after.draft)]
    changes = [*_renamed(before, after), *weights, *_rest(before, after), *scaled]
    return [*events, *changes, *rollout_happenings(before.rollout, after.rollout)]


def _rest(before: InferenceModelStatus, after: InferenceModelStatus) -> list[Happening]:
    """Events of a model that falls asleep or wakes up."""
    if (found := rested_by(before.scaling, after.scaling)) is None:
        return []
    asleep, text = found
    return [Happening(reason="FellAsleep" if asleep else "WokeUp", message=text)]


def _weights(before: ModelStatus | None, after: ModelStatus | None) -> list[Happening]:
    """Events of the weights' commit."""
    if after is None or after.commit is None:
        return []
    if after.commit != (None if before is None else before.commit):
        text = f"workers load commit {after.commit} of {after.uri}, revision {after.revision}"
        return [Happening(reason="ModelResolved", message=text)]
    if after.latest_commit is None or (before is not None and after.latest_commit == before.latest_commit):
        return []
    text = f"{after.revision} of {after.uri} is commit {after.latest_commit} by now; workers load {after.commit}"
    return [Happening(reason="RevisionMoved", message=text)]


def _renamed(before: InferenceModelStatus, after: InferenceModelStatus) -> list[Happening]:
    if before.routing is None or after.routing is None:
        return []
    old, new = before.routing.served_names, after.routing.served_names
    if old[:1] == new[:1]:
        return []
    text = f"served as {new[0]} from now on; until {after.routing.former_until} also as {', '.join(new[1:])}"
    return [Happening(reason="Renamed", message=text)]


def rollout_happenings(before: RolloutStatus | None, after: RolloutStatus | None) -> list[Happening]:
    """Events of a canary and of changed revisions. That one failed is told as the reason to be stalled."""
    if before is None or after is None:
        return []
    events: list[Happening] = []
    old, new = before.canary, after.canary
    if (
        after.phase == "Canary"
        and new is not None
        and (old is None or (old.revision, old.step) != (new.revision, new.step))
    ):
        events.append(Happening(reason="CanaryStep", message=f"revision {new.revision} is at step {new.step}"))
    if before.phase == "Canary" and after.phase == "Progressing":
        done = "is promoted" if old is not None and old.revision == after.stable_revision else "is given up"
        events.append(Happening(reason="CanaryEnded", message=f"revision {old.revision if old else '?'} {done}"))
    if after.phase == "Complete" and before.complete_revision != after.complete_revision:
        events.append(Happening(reason="RolledOut", message=f"all workers have revision {after.complete_revision}"))
    return events


def apply_happenings(applied: Iterable[Manifest], live: Children) -> list[Happening]:
    """Events of workloads that are made, which are one, or scaled; `live` is what was there before."""
    created, events = list[str](), list[Happening]()
    for manifest in applied:
        replicas = dig(manifest, "spec", "replicas")
        if replicas is None:
            continue
        key = child_key(manifest)
        before = live.get(key)
        if before is None:
            created.append(f"{key} with {replicas} pods")
        elif (was := dig(before, "spec", "replicas")) != replicas:
            events.append(Happening(reason="Scaled", message=f"scaled {key} from {was} to {replicas} pods"))
    return [*([Happening(reason="Created", message=f"created {', '.join(created)}")] if created else []), *events]


def _by_type(status: InferenceModelStatus) -> dict[str, Condition]:
    return {condition.type: condition for condition in status.conditions}


def _is_true(condition: Condition | None) -> bool:
    return condition is not None and condition.status == "True"


def _said(condition: Condition | None) -> tuple[str, str] | None:
    return None if condition is None else (condition.reason, condition.message)
