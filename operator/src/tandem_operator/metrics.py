"""The operator's own figures at `/metrics`."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RECONCILES = Counter("tandem_operator_reconciles", "Looks at a model, by how they ended.", ["result"])
RECONCILE_SECONDS = Histogram("tandem_operator_reconcile_seconds", "Time of one look at a model.")
WRITES = Counter("tandem_operator_writes", "Requests that change the cluster.", ["verb", "kind"])
FLEET_REPORTS = Counter(
    "tandem_operator_fleet_reports", "Requests for gateways' reports, by how they ended.", ["result"]
)
QUEUE_DEPTH = Gauge("tandem_operator_queue_depth", "Models that wait to be looked at.")
LEADER = Gauge("tandem_operator_leader", "1 on the replica that holds the lease.")
MODELS = Gauge("tandem_operator_models", "InferenceModels that are known.")
