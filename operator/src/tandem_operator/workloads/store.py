"""The store that workers share blocks through: Mooncake's master, and a holder beside every worker.

A holder is a restartable init container: it starts before the worker and ends after it, so that what a worker writes
while it drains has a place to go. What the two hand to each other are descriptors of shared memory, by a socket of the
pod's network: no volume is shared. Both programs are of the worker's image, and neither has any authentication:
policies say who may reach them.
"""

from __future__ import annotations

from tandem_api import names
from tandem_api.names import Role
from tandem_api.quantities import parse_quantity

from tandem_operator.objects.manifests import DEPLOYMENT, SERVICE, Manifest, dig_list
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.placement import placement
from tandem_operator.workloads.pods import CONFINED, USER

COMPONENT = "store"
HOLDER, MASTER = "store", "master"
"""Containers."""
_PROGRAM = ["dumb-init", "--single-child", "--", "python3", "-m", "tandem_worker.tiers.mooncake.program"]
_LEASE_MILLISECONDS = 500
"""For so long what was read is not given up. Mooncake's own 5 s let no memory turn over under load."""
_CLIENT_SECONDS = 5
"""A holder that is silent for so long is taken to be gone, and what it has with it."""
_TIMEOUT_SECONDS = 1
"""Without progress between two holders. Mooncake's own 30 s are spent spinning."""
_HOLDER_EXTRA = 512 << 20
"""Bytes that a holder takes beside what it keeps."""
_GRACE_SECONDS = 5
_PLACED = ("nodeSelector", "tolerations", "priorityClassName", "imagePullSecrets")
"""What of the decode workers' placement holds for the master: it has no devices and no neighbours to look for."""


def master_name(blueprint: Blueprint) -> str:
    """Name of the model's own master: of its Deployment, and of its Service."""
    return f"{blueprint.name}-{COMPONENT}"


def master_address(blueprint: Blueprint) -> str | None:
    """`host:port` of the master that the model's holders join; None: it has no store."""
    store = blueprint.model.spec.kv.store
    if store is None:
        return None
    own = f"{master_name(blueprint)}.{blueprint.model.metadata.namespace}.svc:{names.STORE_MASTER_PORT}"
    return store.master or own


def build_store(blueprint: Blueprint) -> list[Manifest]:
    """The model's own master and its Service; nothing where it has no store, or shares a master."""
    store = blueprint.model.spec.kv.store
    if store is None or store.master is not None:
        return []
    return [_build_service(blueprint), _build_master(blueprint)]


def build_holder(blueprint: Blueprint, role: Role) -> list[Manifest]:
    """Init containers of a worker pod: the holder, where there is a store."""
    store, master = blueprint.model.spec.kv.store, master_address(blueprint)
    if store is None or master is None:
        return []
    size = int(parse_quantity(store.memory))
    memory = str(size + _HOLDER_EXTRA)
    first, last = names.STORE_DATA_PORTS
    settings = {
        "MC_TCP_BIND_ADDRESS": "$(POD_IP)",
        "MC_MIN_RPC_PORT": str(first),
        "MC_MAX_RPC_PORT": str(last),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(_TIMEOUT_SECONDS),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(_TIMEOUT_SECONDS),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    }
    arguments = [
        "--host=$(POD_IP)",
        f"--port={names.STORE_CLIENT_PORT}",
        f"--master_server_address={master}",
        "--metadata_server=P2PHANDSHAKE",
        f"--global_segment_size={size >> 20} MB",
        "--protocol=tcp",
        "--threads=2",
    ]
    ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}
    container = _container(blueprint, HOLDER, blueprint.image_of(role), "mooncake_client", arguments)
    return [
        container
        | {
            "restartPolicy": "Always",
            "env": [ip, *({"name": name, "value": value} for name, value in settings.items())],
            "resources": {"requests": {"cpu": "100m", "memory": memory}, "limits": {"memory": memory}},
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }
    ]


def _container(blueprint: Blueprint, name: str, image: str, program: str, arguments: list[str]) -> Manifest:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": blueprint.release.image_pull_policy,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": _PROGRAM,
        "args": [program, *arguments, "--logtostderr"],
        "securityContext": CONFINED,
    }


def _build_service(blueprint: Blueprint) -> Manifest:
    port = {"name": MASTER, "port": names.STORE_MASTER_PORT, "targetPort": MASTER, "protocol": "TCP"}
    spec = {"selector": blueprint.selector(COMPONENT), "ports": [port]}
    return blueprint.child(SERVICE, master_name(blueprint), {"spec": spec}, component=COMPONENT)


def _build_master(blueprint: Blueprint) -> Manifest:
    role = blueprint.decode_role
    arguments = [
        f"--rpc_port={names.STORE_MASTER_PORT}",
        "--metrics_host=127.0.0.1",
        f"--default_kv_lease_ttl={_LEASE_MILLISECONDS}",
        f"--client_ttl={_CLIENT_SECONDS}",
    ]
    port = {"name": MASTER, "containerPort": names.STORE_MASTER_PORT, "protocol": "TCP"}
    container = _container(blueprint, MASTER, blueprint.image_of(role), "mooncake_master", arguments) | {
        "ports": [port],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "readinessProbe": {"tcpSocket": {"port": MASTER}, "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {"tcpSocket": {"port": MASTER}, "periodSeconds": 10, "failureThreshold": 6},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": blueprint.worker_account,
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}],
        **_place(blueprint, role),
    }
    spec = {
        "replicas": blueprint.replicas(1),
        "strategy": {"type": "Recreate"},  # two masters would each know a half
        "selector": {"matchLabels": blueprint.selector(COMPONENT)},
        "template": {"metadata": {"labels": blueprint.labels(COMPONENT)}, "spec": pod},
    }
    return blueprint.child(DEPLOYMENT, master_name(blueprint), {"spec": spec}, component=COMPONENT)


def _place(blueprint: Blueprint, role: Role) -> Manifest:
    """The place of the master, and how its image is pulled: as workers of `role`, whose image it is."""
    worker = blueprint.worker_spec(role)
    placed = {key: value for key, value in placement(blueprint, role, worker).items() if key in _PLACED}
    template = worker.pod_template
    overlaid = dig_list(template.spec if template is not None else None, "imagePullSecrets")
    secrets = [*placed.get("imagePullSecrets", []), *overlaid]
    return placed | ({"imagePullSecrets": secrets} if secrets else {})
