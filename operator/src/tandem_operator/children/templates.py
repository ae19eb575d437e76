"""Whether a workload has the pod template that it should have, when others write it too. Pure.

What the API server stores is not what it was told: it fills in defaults, admission policies rewrite, people write by
hand. So a template is known by two records in annotations of its workload. `TEMPLATE_HASH` digests what the operator
said; `ANSWER` digests what the server made of it, where that says something else. What somebody else adds is left alone
and named (`differences`); what takes away from what the operator said is written again.

A StatefulSet calls each stored template a revision. `REVISIONS` records which of them the operator takes for the one
template that it asked for: what a policy adds makes another revision, and no other workers. A restart is asked for by
another template of the model's own, or by `kubectl rollout restart`, whose annotation is part of what is asked for.
`RELEASED` names the revision whose partition the operator has lowered: only with it does a partition say anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tandem_api import names
from tandem_api.crd.status import Condition
from tandem_api.names import GROUP
from tandem_api.wording import name_some

from tandem_operator.children.matching import satisfies
from tandem_operator.objects.manifests import WORKLOADS, ChildKey, Manifest, annotations_of, child_key, dig
from tandem_operator.workloads.blueprint import digest
from tandem_operator.workloads.child import TEMPLATE_HASH

ANSWER = f"{GROUP}/template-answer"
REVISIONS = f"{GROUP}/template-revisions"
RELEASED = f"{GROUP}/released-revision"
WITHHELD = f"{GROUP}/withheld-revision"
"""On a StatefulSet that was given no pods while a rollout was held: the newest revision. Until as many serve again as
are promised, they come back from the one before."""
_FIRST = "*"
"""Among `REVISIONS`: the one that the StatefulSet was made with, which nobody knows before it is made."""
FOREIGN_RESTART = "kubectl.kubernetes.io/restartedAt"
"""What `kubectl rollout restart` writes into a pod template."""
MUTATED = "TemplateMutated"
_NAMED = 8
_MOST = 8
"""Revisions that are remembered as alike: a policy that writes another text each time must not grow the object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revisions:
    """The revisions of a StatefulSet's template."""

    newest: str
    current: str | None
    """Which one a pod below the partition is made from."""
    alike: frozenset[str]
    """Those that are what the operator asks for; a pod of another one is outdated."""

    @property
    def is_even(self) -> bool:
        """A lost pod comes back as it should be, wherever the partition is."""
        return self.current in self.alike


def is_withheld(workload: Manifest) -> bool:
    """Whether its pods are to come back from the template before the newest: all went while a rollout was held."""
    return WITHHELD in annotations_of(workload)


def is_new_template(desired: Manifest, present: Manifest) -> bool:
    """Whether applying it gives pods another template. A StatefulSet of an earlier release has no digest of it."""
    if not _is_signed_alike(desired, present, unsigned=True):
        return True
    template = dig(present, "spec", "template")
    return not is_answer(present) and not satisfies(template, dig(desired, "spec", "template"))


def is_asked_for(desired: Manifest, present: Manifest) -> bool:
    """Whether the operator has applied this template last, whatever others have made of it since."""
    if TEMPLATE_HASH not in annotations_of(present):
        return satisfies(dig(present, "spec", "template"), dig(desired, "spec", "template"))
    return _is_signed_alike(desired, present)


def _is_signed_alike(desired: Manifest, present: Manifest, *, unsigned: bool = False) -> bool:
    """`unsigned` is what counts where nothing tells."""
    signed = annotations_of(present).get(TEMPLATE_HASH)
    return unsigned if signed is None else signed == annotations_of(desired).get(TEMPLATE_HASH)


def is_answer(present: Manifest) -> bool:
    """Whether the template is still what the API server made of the last one that was applied."""
    answer = annotations_of(present).get(ANSWER)
    return answer is not None and answer == answer_digest(present)


def answer_digest(present: Manifest) -> str:
    return digest(dig(present, "spec", "template"))[:16]


def is_rewritten(desired: Manifest, answer: Manifest) -> bool:
    """Whether the API server has answered with another template than it was told, and that is not recorded yet."""
    told = dig(desired, "spec", "template")
    return told is not None and not satisfies(dig(answer, "spec", "template"), told) and not is_answer(answer)


def with_answer(desired: Manifest, answer: Manifest) -> Manifest:
    """`desired` with a record of what the API server makes of its template."""
    annotations = annotations_of(desired) | {ANSWER: answer_digest(answer)}
    return desired | {"metadata": desired["metadata"] | {"annotations": annotations}}


def as_answered(desired: Manifest, present: Manifest) -> Manifest:
    """`desired` in the words of the API server, to compare it with what is there."""
    if "template" not in desired.get("spec", {}) or not _is_signed_alike(desired, present) or not is_answer(present):
        return desired
    return desired | {"spec": desired["spec"] | {"template": present["spec"]["template"]}}


def read_revisions(workload: Manifest) -> Revisions:
    """The revisions of a StatefulSet whose controller has seen its template.

    What is not at rest has one revision alone: its controller replaces pods of any other one.
    """
    newest, current = (dig(workload, "status", name) for name in ("updateRevision", "currentRevision"))
    current = None if current is None else str(current)
    known = {str(newest)} if (recorded := _recorded(workload)) is None else {*recorded, str(newest)}
    alike = frozenset(str(current if name == _FIRST else name) for name in known)
    return Revisions(newest=str(newest), current=current, alike=alike if current in alike else frozenset({str(newest)}))


def record_revisions(workload: Manifest, revisions: Revisions) -> str:
    """The value of `REVISIONS`. Of too many the newest and the current one are kept, and some of the others."""
    if _recorded(workload) == [_FIRST] and revisions.alike == frozenset({revisions.newest}):
        return annotations_of(workload)[REVISIONS]
    first = [name for name in (revisions.newest, revisions.current) if name in revisions.alike]
    kept = [*dict.fromkeys(first), *sorted(revisions.alike - set(first))][:_MOST]
    return " ".join([_template_key(workload), *sorted(kept)])


def record_first(workload: Manifest) -> Manifest:
    """A StatefulSet that is about to be made, with the record of its one revision."""
    records = {REVISIONS: f"{_template_key(workload)} {_FIRST}"}
    metadata = workload["metadata"] | {"annotations": annotations_of(workload) | records}
    return workload | {"metadata": metadata}


def _recorded(workload: Manifest) -> list[str] | None:
    """What is recorded of the present wish."""
    key, *known = (annotations_of(workload).get(REVISIONS) or "").split() or [""]
    return known if key == _template_key(workload) else None


def _template_key(workload: Manifest) -> str:
    """Names what is asked for: the operator's template, and a restart by hand."""
    restart = dig(workload, "spec", "template", "metadata", "annotations", FOREIGN_RESTART)
    signed = annotations_of(workload).get(TEMPLATE_HASH) or "unsigned"
    return signed if restart is None else f"{signed}@{digest(restart)[:8]}"


def is_released(workload: Manifest) -> bool:
    """Whether it was the operator that lowered the partition, for the revision that is the newest now."""
    return annotations_of(workload).get(RELEASED) == str(dig(workload, "status", "updateRevision"))


def template_condition(desired: Iterable[Manifest], live: Mapping[ChildKey, Manifest]) -> list[Condition]:
    """What others have made of the templates that are in force; nothing where they are as the operator said."""
    found: list[str] = []
    for workload in desired:
        present = live.get(key := child_key(workload))
        if key.kind in WORKLOADS and present is not None and not is_new_template(workload, present):
            changes = differences(workload, present)
            found += [f"of {key} {name_some(changes, _NAMED)}"] if changes else []
    if not found:
        return []
    text = (
        f"something else has written into pod templates, an admission policy or a person: {'; '.join(found)}. Workers"
        f" that run stay as they are until they are replaced anyway; annotate the model with {names.ANNOTATION_RESTART}"
        " to replace them now"
    )
    return [Condition(type=MUTATED, status="True", reason="ChangedByOthers", message=text)]


_FILLED_IN = frozenset(
    {
        "apiVersion", "creationTimestamp", "defaultMode", "dnsPolicy", "failureThreshold", "imagePullPolicy", "mode",
        "periodSeconds", "protocol", "resources", "restartPolicy", "schedulerName", "scheme", "securityContext",
        "serviceAccount", "successThreshold", "terminationGracePeriodSeconds", "terminationMessagePath",
        "terminationMessagePolicy", "timeoutSeconds", "type", "hostPort", "hostNetwork", "hostPID", "hostIPC",
    }
)  # fmt: skip
"""Fields of pod templates that the API server fills in where nothing is said."""
_KEYS = ("name", "mountPath", "key", "conditionType", "topologyKey", "containerPort")
"""What an item of a list goes by."""


def differences(desired: Manifest, present: Manifest) -> list[str]:
    """What others have made of a workload's pod template, a phrase each."""
    return list(_differences(dig(present, "spec", "template"), dig(desired, "spec", "template"), path="", field=""))


def _differences(live: Any, desired: Any, *, path: str, field: str) -> Iterator[str]:
    if not isinstance(desired, (dict, list)) and satisfies(live, desired, field=field):
        return
    if isinstance(desired, dict) and isinstance(live, dict):
        yield from _of_maps(cast(dict[str, Any], live), cast(dict[str, Any], desired), path=path, field=field)
    elif isinstance(desired, list) and isinstance(live, list):
        yield from _of_lists(cast(list[Any], live), cast(list[Any], desired), path=path)
    elif desired is None:
        yield f"{path} is added"
    elif live is None:
        if desired not in ({}, []):
            yield f"{path} is missing"
    else:
        yield f"{path} is {_words(live)} instead of {_words(desired)}"


def _of_maps(live: Mapping[str, Any], desired: Mapping[str, Any], *, path: str, field: str) -> Iterator[str]:
    names_of_people = field in ("annotations", "labels", "nodeSelector", "limits", "requests")
    if names_of_people and satisfies(dict(live), dict(desired), field=field) and live.keys() == desired.keys():
        return
    for key in sorted({*live, *desired}):
        if key in (FOREIGN_RESTART,) or (key not in desired and not names_of_people and key in _FILLED_IN):
            continue
        where = f"{path}[{key}]" if names_of_people else f"{path}.{key}" if path else key
        if key not in desired:
            if live[key] not in (None, {}, []):
                yield f"{where} is added"
        else:
            yield from _differences(live.get(key), desired[key], path=where, field=key)


def _of_lists(live: list[Any], desired: list[Any], *, path: str) -> Iterator[str]:
    have, want = _by_name(live), _by_name(desired)
    for name in dict.fromkeys([*want, *have]):
        where = f"{path}[{name}]"
        if name not in want:
            yield f"{where} is added"
        elif name not in have:
            yield f"{where} is missing"
        else:
            yield from _differences(have[name], want[name], path=where, field="")


def _by_name(items: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for position, item in enumerate(items):
        fields = cast(dict[str, Any], item) if isinstance(item, dict) else {}
        found.setdefault(str(next((fields[key] for key in _KEYS if key in fields), position)), item)
    return found


def _words(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
