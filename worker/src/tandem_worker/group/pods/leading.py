"""The first process of a group: it gathers the others, and starts those of its own pod."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_api.launch import ModelSource, WorkerConfig

from tandem_worker.group.control.leader import GroupLeader
from tandem_worker.group.control.link import Loss
from tandem_worker.group.pods.children import Children
from tandem_worker.group.topology import NodePlace, RankOrder, describe_identity
from tandem_worker.host.environment import PodFacts
from tandem_worker.host.errors import StartupError
from tandem_worker.host.runtime import Runtime
from tandem_worker.parallel.shape import GroupShape

if TYPE_CHECKING:
    import torch

    from tandem_worker.group.executor import GroupSeat


class LeadingPod:
    def __init__(
        self,
        config: WorkerConfig,
        pod: PodFacts,
        place: NodePlace,
        runtime: Runtime,
        *,
        on_lost: Callable[[Loss], None],
        on_leaving: Callable[[], None],
    ) -> None:
        """`on_lost` gets the cause once when a process of the group is gone; `on_leaving` when another pod must end.

        Both are called on threads of the group.
        """
        self._config, self._pod, self._place, self._runtime = config, pod, place, runtime
        self.shape = GroupShape.of(config.group.parallelism)
        self.leader = GroupLeader(
            self.shape.world_size,
            describe_identity(config),
            on_lost=on_lost,
            on_leaving=on_leaving,
            ring=runtime.peers,
            vitals=runtime.vitals,
        )
        self.children = Children(self.leader.lose, runtime.vitals)

    def start(self, path: Path, draft: Path | None = None) -> None:
        """Open the meeting place and start the other ranks of this pod on the model at `path`, with the head at
        `draft`. Raises StartupError."""
        group, host = self._config.group, self._runtime.host
        if group.num_nodes == 1:
            host = "127.0.0.1"
        try:
            port = self.leader.listen(host, self._place.port)
        except OSError as error:
            raise StartupError(
                "PortInUse", f"The group's port {group.port} cannot be opened at {host}: {error}"
            ) from error
        near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        order = RankOrder(
            config=self._config, rank=0, local_rank=0, leader_host=near, leader_port=port, host=self._runtime.host
        )
        start_children(self.children, order, path, draft, self._place.ranks)

    def form(self, path: Path, device: torch.device, dtype: torch.dtype | None) -> GroupSeat:
        """Wait for every rank, however long it takes. Raises GroupLostError, StartupError."""
        from tandem_worker.group.executor import GroupSeat
        from tandem_worker.group.rank import check_checkpoint, form_group
        from tandem_worker.group.transport import rank_endpoint

        model = check_checkpoint(self._config, path)
        context = form_group(self.leader, self.shape, path, device=device, dtype=dtype)
        endpoint = rank_endpoint(self._config, self._pod, 0)
        return GroupSeat(leader=self.leader, context=context, shape=self.shape, model=model, endpoint=endpoint)

    def stop(self) -> None:
        """The orderly end of every process of the group."""
        self.leader.stop()
        self.children.stop(timeout=5.0)


def start_children(children: Children, own: RankOrder, path: Path, draft: Path | None, ranks: range) -> None:
    """The processes of a pod's ranks but the first, whose order is `own` and which has found the model at `path`, and
    its head at `draft`."""
    config, speculative = own.config, own.config.speculative
    if draft is not None:
        speculative = speculative.model_copy(update={"draft": ModelSource(uri=draft.resolve().as_uri())})
    source = config.model.model_copy(update={"uri": path.resolve().as_uri()})
    found = config.model_copy(update={"model": source, "speculative": speculative})
    for local_rank, rank in enumerate(ranks):
        if local_rank:
            children.start(own.model_copy(update={"config": found, "rank": rank, "local_rank": local_rank}))
