"""Names that two or more parts must agree on: labels, annotations, headers, ports, child objects.

Everything here is a constant or a pure function of names. A part that needs such a name takes it from here and never
spells it out again.
"""

from __future__ import annotations

from enum import StrEnum

GROUP = "tandem.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceModel"
PLURAL = "inferencemodels"
FIELD_MANAGER = "tandem-operator"

LABEL_MODEL = f"{GROUP}/model"
"""On every child: the name of its InferenceModel."""
LABEL_ROLE = f"{GROUP}/role"
"""On pods and role-scoped children: a `Role`."""
LABEL_REVISION = f"{GROUP}/revision"
"""On worker pods: the revision whose key-value blocks are compatible with each other."""
LABEL_ENGINE = f"{GROUP}/engine"
"""On worker pods that run another engine than Tandem's: its kind, as in `spec.engine.kind`."""
LABEL_NODES_PER_REPLICA = f"{GROUP}/nodes-per-replica"
"""On worker pods: how many pods, by their ordinals one after another, form one replica."""
ANNOTATION_CONFIG_HASH = f"{GROUP}/config-hash"
"""On pod templates: digest of the launch configuration, so that a changed one rolls the pods."""
ANNOTATION_SPEC_HASH = f"{GROUP}/spec-hash"
"""On every child: digest of what the operator last applied."""
CONDITION_ADMITTED = f"{GROUP}/admitted"
"""Readiness gate of worker pods: the operator sets it once a gateway has admitted the pod. Gateways go by all else."""
ANNOTATION_RETRY_CANARY = f"{GROUP}/retry-canary"
"""On an InferenceModel: any new value tries a revision again whose canary has failed."""
ANNOTATION_RESTART = f"{GROUP}/restart"
"""On an InferenceModel: any new value replaces the workers, as a rollout does. On their pod templates: that value."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "tandem-operator"

REASON_STEP_HUNG = "StepHung"
"""Reason in the termination message of a worker that ended because a step of its engine did not."""
REASON_WAKE_TIMED_OUT = "WakeTimedOut"
"""Reason in the termination message of a worker that was on standby and did not come to serve in time."""
REASON_GROUP_INCOMPLETE = "GroupIncomplete"
REASON_GROUP_LOST = "GroupLost"
"""Reasons in the termination message of a worker that ended because a rank of its group did not come, or is gone: where
that rank's pod says something of its own, that is the cause."""

HEADER_PREFILL = "x-tandem-prefill"
"""Gateway to decode worker: `host:port` of the KV port of the prefill worker to use, best first, comma-separated."""
HEADER_STEP_SECONDS = "x-tandem-step-seconds"
"""Gateway to decode worker: it is to compute the prompt itself although prefill workers are there, and a step of its
engine with a part of that prompt takes at most so many seconds, so that streams beside it keep their pace."""
HEADER_KV_SOURCE = "x-tandem-kv-source"
"""Gateway to decode worker: `host:port` of the KV port of a worker that has blocks of this prompt, and behind
`;tokens=` how many tokens of it, about. Who computes it asks that worker for them where that is sooner."""
HEADER_PROMPT = "x-tandem-prompt"
"""Gateway to decode worker: a name of the prompt, which the worker tells all gateways (`WorkerTelemetry.prompts`) and
understands nothing of."""
HEADER_REQUEST_ID = "x-request-id"
"""Accepted from the client or made by the gateway; echoed on every response and written to every log line."""
HEADER_DECODE_WORKER = "x-tandem-decode-worker"
"""Response: the pod that decoded."""
HEADER_PREFILL_WORKER = "x-tandem-prefill-worker"
"""Response: the pod that prefilled (the decode pod itself when it did so locally)."""

HEADER_ROUTE = "x-tandem-route"
"""Client to gateway: `explain` asks for a header of this name in the response that says where the request went."""

HEADER_QUEUE_SECONDS = "x-tandem-queue-seconds"
"""Response of the gateway: how long the request waited in it for a worker. Absent where it did not."""

HEADER_LENIENT = "x-tandem-lenient"
"""Client to worker, through the gateway: `true` asks to leave some options that are not supported out of account."""
HEADER_IGNORED = "x-tandem-ignored"
"""Response: the options that were."""

HEADER_RETRY = "x-tandem-retry"
"""Response of a worker, on a 503 or 429: nothing was done for this request, another worker may take it. It says one of
the next three.
"""
RETRY_WORKER = "1"
"""This worker takes no requests: it is loading, stopping or not the one to ask."""
RETRY_FULL = "full"
"""As many requests wait at this worker as may."""
RETRY_REQUEST = "request"
"""This worker cannot take this request now, but others."""

HEADER_RESUME = "x-tandem-resume"
"""Gateway to decode worker, for streams: the bytes of the journal before the body, 0 for a stream that begins.
Response: what a journal begins with. See `tandem_api.journal`."""

HEADER_TOKEN = "x-tandem-token"
"""Gateway to worker: `keys.bearer_token`. Without it a worker that has keys answers 401."""

WAKE_PATH = "/wake"
"""At a worker's inference port: a gateway asks it to take requests, and is answered once it does. One on standby goes
on with its start."""
STARTED_PATH = "/startz"
"""At a worker's metrics port: 200 once it has started, to serve or to be on standby."""

KEYS_PATH = "/etc/tandem/keys"
"""Folder of the pod's keys: the mounted Secret."""
PEERS_KEY_FILE = "peers.json"
"""In the Secret and in the folder: what workers prove to each other. Workers only."""
API_KEY_FILE = "api.json"
"""What gateways show workers. Workers and gateways."""

TLS_PATH = "/etc/tandem/tls"
"""Folder of the gateway's certificate and key, `tls.crt` and `tls.key`: the mounted Secret that the model names."""

CONFIG_PATH = "/etc/tandem/config.json"
"""File in which a pod finds its launch configuration."""
MODEL_CACHE_PATH = "/var/cache/tandem"
"""Folder where a worker pod keeps downloaded models: a shared claim or an emptyDir."""
MODEL_CLAIMS_PATH = "/mnt/models"
"""Parent folder of the claims that `pvc://CLAIM/path` model URIs name."""
KV_DISK_PATH = "/var/cache/tandem-kv"
"""Folder where a worker pod keeps key-value blocks that its memory gives up."""
TERMINATION_MESSAGE_PATH = "/dev/termination-log"
"""A worker that cannot start writes one object here before it exits: `{"reason": CamelCase, "message": sentence}`."""

WORKER_HTTP_PORT = 8000
WORKER_METRICS_PORT = 9090
"""Probes, metrics and telemetry."""
WORKER_KV_PORT = 7000
"""Port of a pod's first rank; the others of the pod take the ports after it."""
MOONCAKE_PORTS = (15000, 17000)
"""Ports of Mooncake's engines in decode workers: two ports each, chosen by the library."""
WORKER_GROUP_PORT = 6900
"""Port where the ranks of a replica meet."""
WORKER_FILES_PORT = 6800
"""Port where workers get the model's files from each other. Pods do not declare it: it is for nobody else."""
STORE_MASTER_PORT = 50051
"""Port at which Mooncake's master is asked who has what."""
STORE_CLIENT_PORT = 50052
"""Port at which a pod's own `mooncake_client` is asked by its worker."""
STORE_DATA_PORTS = (14000, 14015)
"""Ports at which one `mooncake_client` asks another one: it takes free ones of these. None is of `MOONCAKE_PORTS`,
which others must not reach."""
STORE_HEALTH_PORT = 50053
"""Port at which Mooncake's programs answer their own container while they live."""
STORE_DISK_PATH = "/var/cache/tandem-store"
"""Folder where a pod's `mooncake_client` keeps blocks on the node's disk."""
STORE_NOTES_PATH = "/tmp/tandem-store"
"""Folder in which the container of a pod's `mooncake_client` and its worker leave each other word."""
GATEWAY_HTTP_PORT = 8080
GATEWAY_HTTPS_PORT = 8443
GATEWAY_METRICS_PORT = 9090
OPERATOR_METRICS_PORT = 9090
OPERATOR_HEALTH_PORT = 8081
SERVICE_PORT = 80
SERVICE_HTTPS_PORT = 443


class Role(StrEnum):
    """What a pod of a model does. `UNIFIED` is a decode StatefulSet that also prefills: `spec.prefill` is absent."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"
    GATEWAY = "gateway"


def workload_name(model: str, role: Role) -> str:
    """Name of the StatefulSet, headless Service, ConfigMap and PodDisruptionBudget of a role; of the gateway's too."""
    return model if role is Role.GATEWAY else f"{model}-{'decode' if role is Role.UNIFIED else role.value}"


def keys_name(model: str) -> str:
    """Name of the Secret with the keys of a model's pods."""
    return f"{model}-keys"


def pod_ordinal(pod: str) -> int:
    """Place of a StatefulSet's pod in its set: the number that its name ends with.

    Raises:
        ValueError: `pod` is not the name of such a pod.
    """
    _, dash, number = pod.rpartition("-")
    if not dash or not (number.isascii() and number.isdigit()):
        raise ValueError(f"{pod!r} is not the name of a StatefulSet's pod: it does not end with - and a number")
    return int(number)


def service_url(model: str, namespace: str, *, tls: bool = False) -> str:
    """Base URL of the OpenAI API inside the cluster (without `/v1`)."""
    return f"{'https' if tls else 'http'}://{model}.{namespace}.svc"
