"""The store that workers share blocks through: Mooncake's master, and a holder beside every worker.

A holder is a restartable init container: it starts before the worker and ends after it, so that what a worker writes
while it drains has a place to go. What the two hand to each other are descriptors of shared memory, by a socket of the
pod's network. Both programs are of the worker's image, and neither has any authentication: policies say who may reach
them. A process of ours stands above each (`tandem_worker.tiers.mooncake.program`): it starts the program again when it
has ended or stopped to answer, and tells the worker why there is none. The kubelet looks whether that process lives.
"""

from __future__ import annotations

from tandem_api import names
from tandem_api.names import Role
from tandem_api.quantities import parse_quantity

from tandem_operator.objects.manifests import DEPLOYMENT, SERVICE, Manifest, dig_list
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.child import build_child, build_labels, build_selector
from tandem_operator.workloads.placement import placement
from tandem_operator.workloads.pods import CONFINED, USER, size_limit

COMPONENT = "store"
HOLDER, MASTER = "store", "master"
"""Containers."""
DISK_VOLUME = "store"
_PROGRAM = ["dumb-init", "--single-child", "--", "python3", "-m", "tandem_worker.tiers.mooncake.program"]
_LEASE_MILLISECONDS = 500
"""For so long what was read is not given up. Mooncake's own 5 s let no memory turn over under load."""
_CLIENT_SECONDS = 5
"""A holder that is silent for so long is taken to be gone, and what it has with it."""
_OTHERS_CLIENT_SECONDS = 10
"""As long as a master takes that nobody has told otherwise."""
_TIMEOUT_SECONDS = 1
"""Without progress between two holders. Mooncake's own 30 s are spent spinning."""
_CALL_MILLISECONDS, _CONNECT_MILLISECONDS = 2000, 1000
"""For so long a holder waits for an answer of the master or of another holder's disk, and for a connection to it."""
_SETUP_TRIES = 2
"""A holder that has found no master so often ends and says so. Mooncake's own 20 tries take a minute and a half."""
_HOLDER_EXTRA = 512 << 20
"""Bytes that a holder takes beside what it keeps."""
_DISK_BUFFER = 64 << 20
"""Bytes through which a holder gives others what is on its disk."""
_DISK_HEAD_ROOM = 16
"""One part in so many of the volume stays free of blocks: the names of what is there are written there, twice while
they are."""
_LEAST_RECORD, _MOST_NODES = 16 << 10, 1 << 20
"""Bytes of a block's record on the disk where blocks are small, and for how many records a holder reserves memory."""
_NODE_BYTES = 1280
"""Memory that a holder takes at the most for each record on its disk: 1.1 KB were seen."""
_MASTER_MEMORY, _MASTER_MEMORY_OF_DISKS = "4Gi", "16Gi"
"""What the master may take, which scaling the workers must not change: 1.0 KB were seen for each block in memory, and
1.7 KB for one that is on a disk too."""
_ALIVE_SECONDS = 60
"""A process above a program that has not looked at it for so long hangs."""
_GRACE_SECONDS = 5
_PLACED = ("nodeSelector", "tolerations", "priorityClassName", "imagePullSecrets")
"""What of the decode workers' placement holds for the master: it has no devices and no neighbours to look for."""


def master_name(blueprint: Blueprint) -> str:
    """Name of the model's own master: of its Deployment, and of its Service."""
    return f"{blueprint.name}-{COMPONENT}"


def master_address(blueprint: Blueprint) -> str | None:
    """`host:port` of the master that the model's holders join, or `etcd://host:port;…` of the etcd that knows it; None:
    it has no store."""
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
    memory = most = size + _HOLDER_EXTRA
    arguments = [
        "--host=$(POD_IP)",
        f"--port={names.STORE_CLIENT_PORT}",
        f"--master_server_address={master}",
        "--metadata_server=P2PHANDSHAKE",
        f"--global_segment_size={size >> 20} MB",
        "--protocol=tcp",
        "--threads=2",
        "--enable_http_server=true",
        f"--http_port={names.STORE_HEALTH_PORT}",
    ]
    settings, program, mounts = holder_settings(), ["mooncake_client"], [{"name": "tmp", "mountPath": "/tmp"}]
    if store.disk is not None:
        disk = int(parse_quantity(store.disk))
        memory += _DISK_BUFFER + disk // 2048
        most = max(memory, most + _DISK_BUFFER + _NODE_BYTES * _count_nodes(_count_disk_bytes(disk)))
        settings |= disk_settings(disk)
        arguments += ["--enable_offload=true", "--minloglevel=1"]  # it would write a line for every read
        settle = 2 + (_CLIENT_SECONDS if store.master is None else _OTHERS_CLIENT_SECONDS)
        file = [f"--disk={names.STORE_DISK_PATH}", f"--disk-bytes={_count_disk_bytes(disk)}"]
        program = [*file, f"--settle={settle}", *program]
        mounts.append({"name": DISK_VOLUME, "mountPath": names.STORE_DISK_PATH})
    ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}
    container = _container(blueprint, HOLDER, blueprint.image_of(role), program, arguments)
    return [
        container
        | {
            "restartPolicy": "Always",
            "env": [ip, *({"name": name, "value": value} for name, value in settings.items())],
            "resources": {"requests": {"cpu": "100m", "memory": str(memory)}, "limits": {"memory": str(most)}},
            "volumeMounts": mounts,
        }
    ]


def holder_settings() -> dict[str, str]:
    """The environment of a holder."""
    first, last = names.STORE_DATA_PORTS
    return {
        "MC_TCP_BIND_ADDRESS": "$(POD_IP)",
        "MC_RPC_TIMEOUT_MS": str(_CALL_MILLISECONDS),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(_CONNECT_MILLISECONDS),
        "MC_STORE_CLIENT_SETUP_RETRIES": str(_SETUP_TRIES),
        "MC_MIN_RPC_PORT": str(first),
        "MC_MAX_RPC_PORT": str(last),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(_TIMEOUT_SECONDS),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(_TIMEOUT_SECONDS),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    }


def build_disk(blueprint: Blueprint) -> list[Manifest]:
    """Volumes of a worker pod: the holder's disk, where the store has one."""
    store = blueprint.model.spec.kv.store
    if store is None or store.disk is None:
        return []
    return [{"name": DISK_VOLUME, "emptyDir": size_limit(store.disk)}]


def _count_disk_bytes(size: int) -> int:
    """Bytes of the file that has the blocks, in a volume of `size` bytes."""
    return size - size // _DISK_HEAD_ROOM


def _count_nodes(file: int) -> int:
    """Records that a holder can have in such a file."""
    return min(_MOST_NODES, 2 * file // _LEAST_RECORD)


def disk_settings(size: int) -> dict[str, str]:
    """The environment of a holder with a volume of `size` bytes: one file that is allocated at the start, so that it
    cannot run full later, and out of which goes first what was written first. Its names are kept beside it, for a
    program that is started again. Records have no sums of Mooncake's: ours are verified with every read, and its own
    only at a start, for which it then reads all of the file."""
    file = _count_disk_bytes(size)
    return {
        "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "offset_allocator_storage_backend",
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": names.STORE_DISK_PATH,
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(file),
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(_DISK_BUFFER),
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        "MOONCAKE_OFFSET_EVICTION_POLICY": "fifo",
        "MOONCAKE_OFFSET_HIGH_RATIO": "0.95",
        "MOONCAKE_OFFSET_LOW_RATIO": "0.9",
        "MOONCAKE_OFFSET_PERSIST_MODE": "relaxed",
        "MOONCAKE_OFFSET_PERSIST_INTERVAL_SECONDS": "60",  # a hundred bytes for each block that is there
        "MOONCAKE_OFFSET_RECORD_CRC": "0",
        "MOONCAKE_OFFSET_MAX_CAPACITY_NODES": str(_count_nodes(file)),
    }


def _container(blueprint: Blueprint, name: str, image: str, program: list[str], arguments: list[str]) -> Manifest:
    """`program`: options of the process above it, and its name."""
    looks = f"test $(($(date +%s) - $(stat -c %Y {names.STORE_NOTES_PATH}/alive))) -lt {_ALIVE_SECONDS}"
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": blueprint.release.image_pull_policy,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": _PROGRAM,
        "args": [
            f"--alive={names.STORE_HEALTH_PORT}",
            f"--notes={names.STORE_NOTES_PATH}",
            *program,
            *arguments,
            "--logtostderr",
        ],
        "securityContext": CONFINED,
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", looks]},
            "initialDelaySeconds": 15,
            "periodSeconds": 20,
            "timeoutSeconds": 5,
            "terminationGracePeriodSeconds": 2 * _GRACE_SECONDS,
        },
    }


def _build_service(blueprint: Blueprint) -> Manifest:
    port = {"name": MASTER, "port": names.STORE_MASTER_PORT, "targetPort": MASTER, "protocol": "TCP"}
    spec = {"selector": build_selector(blueprint, COMPONENT), "ports": [port]}
    return build_child(blueprint, SERVICE, master_name(blueprint), {"spec": spec}, component=COMPONENT)


def _build_master(blueprint: Blueprint) -> Manifest:
    role, disks = blueprint.decode_role, build_disk(blueprint)
    arguments = [
        f"--rpc_port={names.STORE_MASTER_PORT}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={names.STORE_HEALTH_PORT}",
        f"--default_kv_lease_ttl={_LEASE_MILLISECONDS}",
        f"--client_ttl={_CLIENT_SECONDS}",
        *(["--enable_offload=true"] if disks else []),
    ]
    most = _MASTER_MEMORY_OF_DISKS if disks else _MASTER_MEMORY
    port = {"name": MASTER, "containerPort": names.STORE_MASTER_PORT, "protocol": "TCP"}
    container = _container(blueprint, MASTER, blueprint.image_of(role), ["mooncake_master"], arguments) | {
        "ports": [port],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": most}},
        "readinessProbe": {"tcpSocket": {"port": MASTER}, "periodSeconds": 2, "failureThreshold": 2},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": blueprint.account("worker"),
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
        "selector": {"matchLabels": build_selector(blueprint, COMPONENT)},
        "template": {"metadata": {"labels": build_labels(blueprint, COMPONENT)}, "spec": pod},
    }
    return build_child(blueprint, DEPLOYMENT, master_name(blueprint), {"spec": spec}, component=COMPONENT)


def _place(blueprint: Blueprint, role: Role) -> Manifest:
    """The place of the master, and how its image is pulled: as workers of `role`, whose image it is."""
    worker = blueprint.worker_spec(role)
    placed = {key: value for key, value in placement(blueprint, role, worker).items() if key in _PLACED}
    template = worker.pod_template
    overlaid = dig_list(template.spec if template is not None else None, "imagePullSecrets")
    secrets = [*placed.get("imagePullSecrets", []), *overlaid]
    return placed | ({"imagePullSecrets": secrets} if secrets else {})
