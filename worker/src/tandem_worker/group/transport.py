"""The KV endpoints of a group: one per rank, at the pod's KV port plus the rank's number within the pod."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem_api.launch import WorkerConfig
from tandem_api.names import Role

from tandem_worker.group.agreement import GroupPlan
from tandem_worker.host.environment import PodFacts
from tandem_worker.host.errors import StartupError
from tandem_worker.host.runtime import Runtime
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.contract import Identity
from tandem_worker.transfer.decode.client import FollowingReceiver
from tandem_worker.transfer.layout import KVShard
from tandem_worker.transfer.prefill.server import TcpPrefillServer
from tandem_worker.transfer.transports import open_transports

if TYPE_CHECKING:
    from tandem_worker.model.contract import KVCache


def rank_endpoint(config: WorkerConfig, pod: PodFacts, local_rank: int) -> str:
    """The address where a rank takes connections, `host:port`."""
    host = f"[{pod.pod_ip}]" if ":" in pod.pod_ip else pod.pod_ip
    return f"{host}:{config.kv.port + local_rank}"


def group_identity(config: WorkerConfig, pod: PodFacts, digest: str, plan: GroupPlan) -> Identity:
    """What a KV end says of itself in HELLO. Prefill workers name their ranks, which decode ranks connect to."""
    return Identity(
        worker=pod.pod,
        revision=config.revision,
        model_digest=digest,
        layout=plan.layout.fingerprint,
        ranks=plan.ranks if config.role is Role.PREFILL else (),
    )


def start_server(server: TcpPrefillServer, port: int) -> TcpPrefillServer:
    """Raises StartupError when the port is taken."""
    try:
        server.start()
    except OSError as error:
        raise StartupError("PortInUse", f"The KV port {port} cannot be opened: {error}") from error
    return server


def open_follower_transport(
    config: WorkerConfig,
    pod: PodFacts,
    runtime: Runtime,
    local_rank: int,
    *,
    digest: str,
    kv_cache: KVCache,
    shard: KVShard,
    plan: GroupPlan,
    answer: Callable[[bytes], None],
) -> Callable[[bytes], None] | None:
    """A following rank's end of transfers: what handles rank 0's posts, in their place among the steps.

    None where the role moves no blocks. `answer` brings a message to rank 0. Raises StartupError.
    """
    if config.role is Role.UNIFIED:
        return None
    space = BlockSpace(kv_cache, shard, plan.layout)
    transports = open_transports(config.kv, pod.pod_ip)
    identity = group_identity(config, pod, digest, plan)
    if config.role is Role.DECODE:
        receiver = FollowingReceiver(
            space,
            identity,
            answer,
            verify=config.kv.verify,
            ring=runtime.peers,
            vitals=runtime.vitals,
            transports=transports,
        )
        return receiver.handle
    port = config.kv.port + local_rank
    server = TcpPrefillServer(
        engine=None,
        space=space,
        identity=identity,
        host=runtime.host,
        port=port,
        ring=runtime.peers,
        vitals=runtime.vitals,
        transports=transports,
    )
    return start_server(server, port).handle
