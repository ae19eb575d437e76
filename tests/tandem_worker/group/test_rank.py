"""What a rank does that follows."""

from __future__ import annotations

from typing import Any

import torch
from tandem_worker.engine.execute.host_pool import HostPool
from tandem_worker.engine.schedule.host_cache import Moves
from tandem_worker.group.control.link import MessageKind
from tandem_worker.group.control.wire import encode_moves
from tandem_worker.group.rank import _compute_steps
from tandem_worker.model.contract import KVCacheSpec, KVLayerSpec, allocate_kv_cache


class Executor:
    """A rank's, which has nothing but blocks."""

    def __init__(self) -> None:
        spec = KVCacheSpec(layers=(KVLayerSpec(block_shape=(2,)),) * 2, dtype=torch.float32, block_size=4)
        self.kv_cache = allocate_kv_cache(spec, 4, torch.device("cpu"))
        self.host_pool = HostPool(self.kv_cache, 4)

    def move_blocks(self, moves: Moves, *, settle: bool) -> None:
        self.host_pool.launch(moves)

    def await_fetches(self) -> None:
        self.host_pool.await_all()


class Member:
    def __init__(self, *messages: tuple[MessageKind, bytes]) -> None:
        self._messages = list(messages)

    def receive(self) -> tuple[MessageKind, bytes]:
        return self._messages.pop(0)


def test_a_head_writes_to_blocks_when_what_they_held_is_with_the_host() -> None:
    executor: Any = Executor()
    head = executor.kv_cache.layers[-1]
    head[3] = 7.0
    moves = encode_moves(Moves(out=((3, 1),), into=()), settle=False)
    member: Any = Member((MessageKind.MOVES, moves), (MessageKind.HEAD, b""), (MessageKind.STOP, b""))
    _compute_steps(member, executor, None, lambda _: head[3].fill_(1.0), lambda: None)
    back = encode_moves(Moves(out=(), into=((1, 2),)), settle=False)
    _compute_steps(Member((MessageKind.MOVES, back), (MessageKind.STOP, b"")), executor, None, None, lambda: None)  # type: ignore[arg-type]
    executor.await_fetches()
    assert head[2].tolist() == [7.0, 7.0]
    assert head[3].tolist() == [1.0, 1.0]
