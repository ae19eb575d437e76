"""A draft head that all ranks of a group compute: rank 0 says what, the others do it in its place among the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tandem_worker.engine.errors import GroupLostError
from tandem_worker.engine.execute.heads import HeadHere
from tandem_worker.group.control.leader import GroupLeader
from tandem_worker.group.control.link import Loss
from tandem_worker.group.control.wire import HeadCall, decode_head_order, encode_head_order
from tandem_worker.model.draft.chains import ChainStart
from tandem_worker.parallel.collectives import Collective
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.parallel.shape import GroupShape


class GroupHead:
    """Rank 0's end of one lane's head; satisfies `engine.execute.heads.HeadRanks`.

    Every call raises GroupLostError, whatever it was that failed: what one rank does not finish leaves the others
    waiting inside it.
    """

    def __init__(
        self, own: HeadHere, leader: GroupLeader, context: ParallelContext, shape: GroupShape, lane: int
    ) -> None:
        """`own`: the share of a head in this process, which computes in lane 0."""
        self._own = own if lane == 0 else None
        self._num_guessed = own.num_guessed
        self._leader = leader
        self._world, self._speaker = context.world, shape.speaker(lane)
        self._ranks = [rank for rank in range(1, leader.size) if shape.lane(rank) == lane]

    @property
    def num_bytes(self) -> int:
        return 0 if self._own is None else self._own.num_bytes

    def begin(self, starts: Sequence[ChainStart], depth: int) -> None:
        texts = [[start.token, start.position, *start.blocks] for start in starts]
        with self._together():
            self._tell(HeadCall.BEGIN, [depth], *texts)
            if self._own is not None:
                self._own.begin(starts, depth)

    def compute(self, active: Sequence[int], said: Sequence[int]) -> torch.Tensor:
        with self._together():
            self._tell(HeadCall.COMPUTE, active, said)
            logits = None if self._own is None else self._own.compute(active, said)
            if self._speaker == 0:
                assert logits is not None, "rank 0 speaks for its own lane"
                return logits
            assert self._world is not None
            return self._world.receive(torch.empty(len(active), self._num_guessed), self._speaker)

    def keep(self, rows: Sequence[int]) -> None:
        with self._together():
            self._tell(HeadCall.KEEP, rows)
            if self._own is not None:
                self._own.keep(rows)

    def settle(self) -> None:
        """Ranks write at once."""

    def _tell(self, call: HeadCall, *lists: Sequence[int]) -> None:
        self._leader.send_head_order(self._ranks, encode_head_order(call, *lists))

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._leader.blame(Loss(f"rank 0 failed in a pass of the draft head: {type(error).__name__}: {error}"))
            raise GroupLostError(self._leader.cause) from error


def follow_head(own: HeadHere, world: Collective | None) -> Callable[[bytes], None]:
    """What a following rank does with rank 0's orders. `world`: where it sends rank 0 the logits; None: others do."""

    def obey(data: bytes) -> None:
        call, lists = decode_head_order(data)
        if call is HeadCall.BEGIN:
            (depth,), *texts = lists
            own.begin([ChainStart(token, position, blocks) for token, position, *blocks in texts], depth)
        elif call is HeadCall.COMPUTE:
            logits = own.compute(*lists)
            if world is not None:
                world.send(logits, 0)
        else:
            own.keep(*lists)

    return obey
