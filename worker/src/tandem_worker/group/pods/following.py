"""Processes that follow: a pod's further ranks, and the first process of a pod that does not lead."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable

from tandem_api.names import REASON_STEP_HUNG

from tandem_worker.engine.errors import GroupLostError
from tandem_worker.group.control.link import Loss
from tandem_worker.group.control.member import GroupMember
from tandem_worker.group.pods.children import Children, read_order
from tandem_worker.group.pods.leading import start_children
from tandem_worker.group.topology import RankOrder, describe_identity
from tandem_worker.host.devices import resolve_device, resolve_dtype
from tandem_worker.host.ending import end_process
from tandem_worker.host.environment import PodFacts, raise_descriptor_limit
from tandem_worker.host.errors import StartupError
from tandem_worker.host.logging import configure_logging
from tandem_worker.host.runtime import Runtime, open_runtime
from tandem_worker.host.stacks import dump_stacks

logger = logging.getLogger(__name__)


def run_child(pod: PodFacts) -> None:
    """A further rank of a pod, as its order on standard input says. Ends the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the leader finishes what is running and then stops everybody
    order = read_order(sys.stdin)
    config = order.config
    fields = {"pod": pod.pod, "model": config.model_name, "role": config.role.value, "rank": str(order.rank)}
    configure_logging(pod.log_level, fields)
    raise_descriptor_limit()
    runtime = open_runtime(config, order.host)
    FollowingProcess(order, pod, runtime, describe_identity(config)).run(logger.info, lambda: None)
    logging.shutdown()
    os._exit(0)  # torch's own end would wait for ranks that are ending too


class FollowingProcess:
    """One rank that follows, in this process."""

    def __init__(self, order: RankOrder, pod: PodFacts, runtime: Runtime, identity: str) -> None:
        self._order, self._pod, self._runtime = order, pod, runtime
        self.member = GroupMember(
            order.rank,
            pod=pod.pod,
            identity=identity,
            on_lost=self.lose,
            ring=runtime.peers,
            vitals=runtime.vitals,
        )
        self._children = Children(self._give_up, runtime.vitals)

    def run(self, enter: Callable[[str], None], on_ready: Callable[[], None], ranks: range = range(0)) -> None:
        """Until the leader stops it. `ranks` are those of the pod, where this process starts the others of them."""
        try:
            self._run(enter, on_ready, ranks)
        except GroupLostError as error:
            self.lose(Loss(str(error)))
        except StartupError as error:
            self._give_up(Loss(str(error), error.reason))
        except Exception as error:
            logger.exception("rank %d cannot go on", self._order.rank)
            cause = Loss(f"{type(error).__name__}: {error}")
            self.member.blame(cause)
            self.lose(cause)

    def _run(self, enter: Callable[[str], None], on_ready: Callable[[], None], ranks: range) -> None:
        from tandem_worker.model.sources.digest import ModelDigest
        from tandem_worker.model.sources.resolve import resolve_draft, resolve_model

        order, config = self._order, self._order.config
        enter("fetching the model")
        path = resolve_model(config.model, self._pod.token, self._runtime.files)
        draft = resolve_draft(config, self._pod.draft_token or self._pod.token)
        start_children(self._children, order, path, draft, ranks)
        enter("loading libraries")
        from tandem_worker.group.rank import FollowingRank, check_checkpoint

        follower = FollowingRank(
            member=self.member,
            order=order,
            pod=self._pod,
            runtime=self._runtime,
            path=path,
            draft=draft,
            figures=check_checkpoint(config, path),
            hashing=[ModelDigest(each) for each in (path, draft) if each is not None],
            device=resolve_device(config.device, order.local_rank),
            dtype=resolve_dtype(config.dtype),
        )
        follower.run(enter, on_ready)
        self._children.stop(timeout=5.0)

    def lose(self, cause: Loss) -> None:
        """The group has ended: end this process with the cause in its termination message. Does not return."""
        if cause.reason == REASON_STEP_HUNG:
            dump_stacks()  # it may be this rank that hangs; the leader only waits for it
        end_process(self._pod, cause.reason, cause.message)

    def _give_up(self, cause: Loss) -> None:
        """For a cause that is certainly this pod's own."""
        self.member.blame(cause, patience=0.0)
        self.lose(cause)
