"""Prefill side of disaggregation: prompts of other workers, which of their blocks are reported, and when."""

from __future__ import annotations

from dataclasses import dataclass

from tandem_worker.engine.contract import LayerListener, RemotePrefill
from tandem_worker.engine.schedule.plan import Chunk, StepPlan
from tandem_worker.engine.schedule.prefix_cache import name_prompt
from tandem_worker.engine.schedule.request import Request, Sequence, SequenceState
from tandem_worker.engine.schedule.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class PeerPrefill:
    """A prompt that is computed for another worker. Its blocks stay held until the transfer layer releases it."""

    order: RemotePrefill
    listener: LayerListener
    request: Request
    reported: int
    """Prompt blocks before this index are with the peer, or are reported by the steps so far planned.

    A step that fails or is abandoned ends every peer's prompt in it, so nothing is ever reported again.
    """

    started: bool = False
    """The listener has been told of the first step that computes some of it."""

    @property
    def sequence(self) -> Sequence:
        """The only choice of the request: a peer's prompt is computed once."""
        return self.request.choices[0]

    def report_start(self, num_layers: int, block_size: int) -> None:
        """Before its first step; blocks that were found in this worker's prefix cache are complete in every layer.

        Those that come from host memory are reported when the step has computed the layer, with its own.
        """
        if not self.started:
            self.started = True
            self.listener.prefill_started(self.request.id)
        count = min(self.sequence.num_computed // block_size, self.sequence.num_named)
        if count <= self.reported:
            return
        block_ids = tuple(self.sequence.block_ids[self.reported : count])
        for layer in range(num_layers):
            self.listener.blocks_ready(self.request.id, layer, self.reported, block_ids)
        self.reported = count


def plan_reports(plan: StepPlan, peers: dict[str, PeerPrefill], block_size: int) -> list[LayerReport]:
    """What to report after each layer of this step: blocks that its chunks complete and the peer lacks."""
    reports: list[LayerReport] = []
    for chunk in plan.chunks:
        request = chunk.sequence.request
        if not request.serves_peer:
            continue
        peer = peers[request.id]
        end = _count_complete(chunk, block_size)
        if end > peer.reported:
            reports.append(LayerReport(peer, peer.reported, tuple(chunk.sequence.block_ids[peer.reported : end])))
            peer.reported = end
    return reports


@dataclass(frozen=True, slots=True)
class LayerReport:
    peer: PeerPrefill
    first_index: int
    block_ids: tuple[int, ...]

    def send(self, layer: int) -> None:
        """Tell the listener that `layer`, counted from 0 on this rank, of these blocks is complete."""
        self.peer.listener.blocks_ready(self.peer.request.id, layer, self.first_index, self.block_ids)


def _count_complete(chunk: Chunk, block_size: int) -> int:
    """The prompt's last block is sent as full as it gets."""
    return -(-chunk.end // block_size) if chunk.final else chunk.end // block_size


class PeerPrompts:
    """On the engine thread. A peer's prompt is here until it is released."""

    def __init__(self, scheduler: Scheduler, *, num_layers: int) -> None:
        """`num_layers`: those of this rank."""
        self._scheduler = scheduler
        self._num_layers = num_layers
        self._prompts: dict[str, PeerPrefill] = {}

    def submit(self, request: Request, order: RemotePrefill, listener: LayerListener) -> None:
        """A prompt that another worker ordered; `listener` is told what may be sent."""
        block_size = self._scheduler.blocks.block_size
        self._prompts[request.id] = PeerPrefill(order, listener, request, order.num_cached_tokens // block_size)
        self._scheduler.add(request)

    def report_and_plan(self, plan: StepPlan) -> list[LayerReport]:
        """Report what is in this worker's cache of the prompts that `plan` begins with; what is to be reported after
        each of its layers."""
        block_size = self._scheduler.blocks.block_size
        for chunk in plan.chunks:
            if chunk.sequence.request.serves_peer:
                self._prompts[chunk.sequence.request.id].report_start(self._num_layers, block_size)
        return plan_reports(plan, self._prompts, block_size)

    def finish(self, request: Request, logits: bytes) -> None:
        """The prompt is computed, with these logits of its last token. Its blocks are held until it is released."""
        peer, block_size = self._prompts[request.id], self._scheduler.blocks.block_size
        self._scheduler.hold_for_peer(peer.sequence)
        name = name_prompt(request.chain_root, request.prompt_chain, request.prompt, block_size)
        peer.listener.prefill_done(request.id, logits, request.num_cached_tokens, name)

    def fail(self, request: Request, message: str) -> bool:
        """The prompt cannot be computed, and `message` says why. False: it was released before."""
        peer = self._prompts.get(request.id)
        if peer is None:
            return False
        self._scheduler.hold_for_peer(peer.sequence)
        peer.listener.prefill_failed(request.id, message)
        return True

    def fail_all(self, message: str) -> None:
        """The worker stops, or its step loop is dead."""
        for peer in self._prompts.values():
            if peer.sequence.state is not SequenceState.HELD:
                peer.listener.prefill_failed(peer.request.id, message)

    def release(self, request_id: str) -> None:
        """Nobody needs the blocks of this peer's prompt any more; they stay cached."""
        peer = self._prompts.pop(request_id, None)
        if peer is not None:
            if peer.sequence.state is SequenceState.LOADING and self._scheduler.hooks.loads is not None:
                self._scheduler.hooks.loads.cancel(peer.sequence)
            self._scheduler.finish(peer.sequence)
            peer.request.choices = []
