"""The operator's own figures at `/metrics`."""

from __future__ import annotations

from collections.abc import Set

from prometheus_client import Counter, Gauge, Histogram
from tandem_api.version import VERSION

from tandem_operator.objects.manifests import ModelKey

RECONCILES = Counter("tandem_operator_reconciles", "Looks at a model, by how they ended.", ["result"])
RECONCILE_SECONDS = Histogram("tandem_operator_reconcile_seconds", "Time of one look at a model.")
WRITES = Counter("tandem_operator_writes", "Requests that change the cluster.", ["verb", "kind"])
HUB_QUESTIONS = Counter("tandem_operator_hub_questions", "Times that the hub was asked for a commit.", ["result"])
FLEET_REPORTS = Counter(
    "tandem_operator_fleet_reports", "Requests for gateways' reports, by how they ended.", ["result"]
)
REQUESTS = Counter("tandem_operator_requests", "Requests to the API server, watches included.", ["method"])
QUEUE_DEPTH = Gauge("tandem_operator_queue_depth", "Models that wait to be looked at.")
INFO = Gauge("tandem_operator_info", "1, with the release as a label.", ["version"])
INFO.labels(VERSION).set(1)
LEADER = Gauge("tandem_operator_leader", "1 on the replica that holds the lease.")
MODELS = Gauge("tandem_operator_models", "InferenceModels that are known.")
WATCH_FAILURES = Counter("tandem_operator_watch_failures", "Watches that ended too soon or by an error.", ["kind"])
LEASE_FAILURES = Counter("tandem_operator_lease_failures", "Renewals of the lease that failed.")
MODEL_CONDITION = Gauge(
    "tandem_operator_model_condition", "1 while the condition of the model is true.", ["namespace", "model", "type"]
)
SCALED_MODELS = Gauge("tandem_operator_scaled_models", "Models with targets, whose demand is followed.")
SCALING_DECISIONS = Counter(
    "tandem_operator_scaling_decisions", "Decisions about a model's replicas, by what came of them.", ["result"]
)
SCALING_REPLICAS = Gauge(
    "tandem_operator_scaling_replicas",
    "Replicas of a role with the mode SLO: what it is to have, and what demand alone requires.",
    ["namespace", "model", "role", "kind"],
)
SUSPENDED = "Suspended"
"""No condition of its own: Stalled because somebody asked for that."""
ASLEEP = "ScaledToZero"
"""No condition of its own: the model sleeps because nobody uses it."""
_CONDITIONS = ("Ready", "Available", "Stalled", SUSPENDED, ASLEEP)
_SOME_HAVE = ("ScalingActive", "SLOMet")


def note_conditions(model: ModelKey, true: Set[str], told: Set[str] = frozenset()) -> None:
    """`true` are the conditions that hold, `told` all that the status has."""
    for condition in (*_CONDITIONS, *_SOME_HAVE):
        if condition in _CONDITIONS or condition in told:
            MODEL_CONDITION.labels(model.namespace, model.name, condition).set(condition in true)
        else:
            labels = {"namespace": model.namespace, "model": model.name, "type": condition}
            MODEL_CONDITION.remove_by_labels(labels)


def note_replicas(model: ModelKey, role: str, *, desired: int, required: int) -> None:
    """What was decided about one role."""
    for kind, count in (("desired", desired), ("required", required)):
        SCALING_REPLICAS.labels(model.namespace, model.name, role, kind).set(count)


def forget_replicas(model: ModelKey) -> None:
    """Nothing is decided about a model any more."""
    SCALING_REPLICAS.remove_by_labels({"namespace": model.namespace, "model": model.name})


def forget_model(model: ModelKey) -> None:
    """A model was deleted."""
    MODEL_CONDITION.remove_by_labels({"namespace": model.namespace, "model": model.name})
    forget_replicas(model)
