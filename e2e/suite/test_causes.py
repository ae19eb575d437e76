"""Faults of the cluster and of manifests: `kubectl get im` names each soon, and healing it is enough.

Image, model, Secret and token, a name that is taken, a stopped and a hung worker are in `test_diagnosis` and
`test_readiness`; what waits for a GPU is in `test_canary`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from kubernetes.client import ApiException

from e2e.suite.conftest import make_namespace
from e2e.suite.fleet import Fleet, Kubernetes, Say, smollm2, until

Object = dict[str, Any]
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
POLICIES, BINDINGS = f"{ADMISSION}/validatingadmissionpolicies", f"{ADMISSION}/validatingadmissionpolicybindings"
WEBHOOKS = f"{ADMISSION}/validatingwebhookconfigurations"
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
SETS = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["statefulsets"]}
ARISES = 240.0
"""Seconds until the cluster has run into a fault: it pulls an image, loads a model, measures a disk."""
SOON = 15.0
"""Seconds from when Kubernetes says of a fault what there is to be said until the model's status tells its cause."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that is wrong, the reason (a regular expression) and the words that tell it, and what heals it."""

    reason: str
    words: str
    decode: Object = field(default_factory=dict)
    """In the role's spec; taken out to heal it."""
    quota: bool = False
    heal: Callable[[Kubernetes], None] | None = None
    """Instead of a change of the spec."""
    evidence: str = ""
    """What Kubernetes writes of it into pods or Events, as a regular expression; by default the words."""
    refused: bool = False
    """The operator's own write is refused: that is evident at once."""

    def is_evident(self, written: str) -> bool:
        return self.refused or re.search(self.evidence or re.escape(self.words), written) is not None


def container(**fields: Any) -> Object:
    return {"podTemplate": {"spec": {"containers": [{"name": "worker"} | fields]}}}


def end_policy(kubernetes: Kubernetes) -> None:
    kubernetes.request("DELETE", f"{BINDINGS}/tandem-e2e-tidy")


def relent_webhook(kubernetes: Kubernetes) -> None:
    hooks = kubernetes.request("GET", f"{WEBHOOKS}/tandem-e2e-gone")
    hooks["webhooks"][0]["failurePolicy"] = "Ignore"
    kubernetes.request("PUT", f"{WEBHOOKS}/tandem-e2e-gone", hooks)


def make_priority(kubernetes: Kubernetes) -> None:
    body = {"metadata": {"name": "tandem-e2e-first"}, "value": 1000}
    kubernetes.request("POST", PRIORITIES, body)


FAULTS: dict[str, Fault] = {
    "quota": Fault(reason="PodsNotCreated", words="exceeded quota: one-pod", quota=True),
    "policy": Fault(reason="Rejected|Forbidden", words="ask who runs tandem-e2e-tidy", heal=end_policy, refused=True),
    "webhook": Fault(reason="WebhookFailed", words='webhook "gone.e2e.tandem.dev"', heal=relent_webhook, refused=True),
    "place": Fault(reason="Unschedulable", words="didn't match", decode={"nodeSelector": {"disk": "none-such"}}),
    "claim": Fault(
        reason="VolumeClaimNotFound",
        words="nowhere",
        decode={
            "podTemplate": {"spec": {"volumes": [{"name": "more", "persistentVolumeClaim": {"claimName": "nowhere"}}]}}
        },
    ),
    "memory": Fault(
        reason="OutOfMemory",
        words="memory",
        evidence="OOMKilled",
        decode={"resources": {"requests": {"cpu": "50m", "memory": "200Mi"}, "limits": {"memory": "200Mi"}}},
    ),
    "priority": Fault(
        reason=".*", words="tandem-e2e-first", decode={"priorityClassName": "tandem-e2e-first"}, heal=make_priority
    ),
    "runtime": Fault(reason=".*", words="none-such-runtime", decode={"runtimeClassName": "none-such-runtime"}),
    "disk": Fault(
        # A worker that ends well within its second leaves a pod that says nothing of the eviction.
        reason="EndedByNode|Evicted",
        words="its node",
        evidence="Evict",
        decode={"resources": {"requests": {"cpu": "50m"}, "limits": {"ephemeral-storage": "20Mi"}}},
    ),
    "command": Fault(reason=".*", words="/no-such-program", decode=container(command=["/no-such-program"])),
    "environment": Fault(
        reason="CreateContainerConfigError",
        words="none-such-secret",
        decode=container(
            env=[{"name": "EXTRA", "valueFrom": {"secretKeyRef": {"name": "none-such-secret", "key": "x"}}}]
        ),
    ),
}
HALVES = (tuple(FAULTS)[:6], tuple(FAULTS)[6:])


@pytest.fixture
def admission(names: Sequence[str], kubernetes: Kubernetes, fleet: Fleet) -> Iterator[None]:
    """A policy that refuses one StatefulSet, and a webhook for another one that nobody answers, where these are among
    the faults: they are the whole cluster's, and the other half may be tried at the same time."""
    if "policy" not in names:
        yield
        return
    here = {"matchLabels": {"kubernetes.io/metadata.name": fleet.namespace}}
    policy = {
        "metadata": {"name": "tandem-e2e-tidy"},
        "spec": {
            "matchConstraints": {"resourceRules": [SETS]},
            "validations": [{"expression": "object.metadata.name != 'policy-decode'", "message": "not this one"}],
        },
    }
    binding = {
        "metadata": {"name": "tandem-e2e-tidy"},
        "spec": {
            "policyName": "tandem-e2e-tidy",
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": here},
        },
    }
    hook = {
        "name": "gone.e2e.tandem.dev",
        "clientConfig": {"service": {"namespace": fleet.namespace, "name": "nobody", "port": 443}},
        "rules": [SETS],
        "namespaceSelector": here,
        "matchConditions": [{"name": "one", "expression": "object.metadata.name == 'webhook-decode'"}],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 2,
        "failurePolicy": "Fail",
    }
    hooks = {"metadata": {"name": "tandem-e2e-gone"}, "webhooks": [hook]}
    try:
        for path, body in ((POLICIES, policy), (BINDINGS, binding), (WEBHOOKS, hooks)):
            kubernetes.request("POST", path, body)
        for name in ("policy-decode", "webhook-decode"):
            until(f"{name} is refused", lambda name=name: is_refused(kubernetes, fleet, name), within=60)
        yield
    finally:
        for path in (f"{BINDINGS}/tandem-e2e-tidy", f"{POLICIES}/tandem-e2e-tidy", f"{WEBHOOKS}/tandem-e2e-gone"):
            remove(kubernetes, path)


@pytest.fixture
def priority(names: Sequence[str], kubernetes: Kubernetes) -> Iterator[None]:
    """Takes back the class by which one fault is healed."""
    yield
    if "priority" in names:
        remove(kubernetes, f"{PRIORITIES}/tandem-e2e-first")


def is_refused(kubernetes: Kubernetes, fleet: Fleet, name: str) -> bool:
    """Whether a StatefulSet of this name would be: the API server reads policies and webhooks some time after the
    write, and until then it lets everything pass.
    """
    labels = {"app": name}
    body = {
        "metadata": {"name": name},
        "spec": {
            "serviceName": name,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels}, "spec": {"containers": [{"name": "worker", "image": "none"}]},
            },
        },
    }  # fmt: skip
    try:
        kubernetes.request("POST", f"/apis/apps/v1/namespaces/{fleet.namespace}/statefulsets?dryRun=All", body)
    except ApiException as error:
        return any(word in str(error.body) for word in ("tandem-e2e-tidy", "gone.e2e.tandem.dev"))
    return False


def remove(kubernetes: Kubernetes, path: str) -> None:
    """Whether or not it is there."""
    try:
        kubernetes.request("DELETE", path)
    except ApiException as error:
        if error.status != 404:
            raise


@pytest.fixture
def small(tandem: Any, kubernetes: Kubernetes, fleet: Fleet) -> Iterator[Fleet]:
    """A namespace in which one pod may be."""
    made = make_namespace(tandem, kubernetes, f"{fleet.namespace}-small")
    quota = {"metadata": {"name": "one-pod"}, "spec": {"hard": {"pods": "1"}}}
    kubernetes.request("POST", f"/api/v1/namespaces/{made.namespace}/resourcequotas", quota)
    yield made
    kubernetes.request("DELETE", f"/api/v1/namespaces/{made.namespace}")


def told(fleet: Fleet, name: str, fault: Fault) -> Object | None:
    """What `kubectl get im` shows of it: the reason and message of a condition that is not Ready itself."""
    for condition in fleet.get("inferencemodels", name).get("status", {}).get("conditions", []):
        is_cause = condition["type"] in ("Stalled", "Reconciling") and fault.words in condition["message"]
        if is_cause and re.fullmatch(fault.reason, condition["reason"]):
            return condition
    return None


def written_of(fleet: Fleet, name: str) -> str:
    """What Kubernetes says of a model's pods, and in Events about whatever the model has."""
    events = [each for each in fleet.find("events") if each["involvedObject"]["name"].startswith(name)]
    return json.dumps([[pod["status"] for pod in fleet.pods(name)], [each["message"] for each in events]])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", HALVES, ids=("first", "second"))
def test_each_fault_is_named_and_healing_it_is_enough(
    names: Sequence[str], fleet: Fleet, small: Fleet, admission: None, priority: None, kubernetes: Kubernetes, say: Say
) -> None:
    places = {name: small if FAULTS[name].quota else fleet for name in names}
    plain = {name: smollm2(name, prefill=None) for name in names}
    applied: dict[str, float] = {}
    for name in names:
        broken = plain[name] | {
            "spec": plain[name]["spec"] | {"decode": plain[name]["spec"]["decode"] | FAULTS[name].decode}
        }
        places[name].apply(broken)
        applied[name] = time.monotonic()
    left = dict.fromkeys(names)
    evident: dict[str, float] = {}
    late: dict[str, float] = {}

    def all_told() -> bool:
        for name in list(left):
            if name not in evident and FAULTS[name].is_evident(written_of(places[name], name)):
                evident[name] = time.monotonic()
            if (seen := told(places[name], name, FAULTS[name])) is not None:
                now = time.monotonic()
                late[name] = now - evident.get(name, now)
                say(
                    f"fault {name}: {seen['type']} {seen['reason']} {late[name]:.1f} s after Kubernetes knew,"
                    f" {now - applied[name]:.0f} s after it was applied: {seen['message'][:300]}"
                )
                del left[name]
        assert not left, {name: places[name].get("inferencemodels", name)["status"]["conditions"] for name in left}
        return True

    until("every cause is told", all_told, within=ARISES + SOON)
    assert max(late.values()) <= SOON, late
    for name in names:
        if (heal := FAULTS[name].heal) is not None:
            heal(kubernetes)
        elif FAULTS[name].quota:
            path = f"/api/v1/namespaces/{small.namespace}/resourcequotas/one-pod"
            body = {"spec": {"hard": {"pods": "9"}}}
            kubernetes.request("PATCH", path, body, "application/merge-patch+json")
        else:
            places[name].apply(plain[name])
    for name in names:
        places[name].wait_ready(name)
