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


class GroupHead:
    """Rank 0's end; satisfies `engine.execute.heads.HeadRanks`. Every call raises GroupLostError, whatever it was that
    failed: a call that one rank does not finish leaves the others waiting inside it."""

    def __init__(self, own: HeadHere, leader: GroupLeader, world: Collective | None, speaker: int) -> None:
        """`world`: where the rank `speaker` sends the logits of a pass; None: this rank has them itself."""
        self._own = own
        self._leader = leader
        self._world, self._speaker = world, speaker

    def begin(self, starts: Sequence[ChainStart], depth: int) -> None:
        texts = [[start.token, start.position, *start.blocks] for start in starts]
        with self._together():
            self._leader.send_head_order(encode_head_order(HeadCall.BEGIN, [depth], *texts))
            self._own.begin(starts, depth)

    def compute(self, active: Sequence[int], said: Sequence[int]) -> torch.Tensor:
        with self._together():
            self._leader.send_head_order(encode_head_order(HeadCall.COMPUTE, active, said))
            logits = self._own.compute(active, said)
            if self._world is None:
                return logits
            return self._world.receive(torch.empty(len(active), self._own.num_guessed), self._speaker)

    def keep(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        with self._together():
            self._leader.send_head_order(encode_head_order(HeadCall.KEEP, rows, blocks))
            self._own.keep(rows, blocks)

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
