"""Prefill side of disaggregation: which finished blocks are reported to the transfer layer, and when."""

from __future__ import annotations

from dataclasses import dataclass

from tandem_worker.engine.contract import LayerListener, RemotePrefill
from tandem_worker.engine.schedule.plan import Chunk, StepPlan
from tandem_worker.engine.schedule.request import Request, Sequence


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
        """Before its first step; blocks that were found in this worker's prefix cache are complete in every layer."""
        if not self.started:
            self.started = True
            self.listener.prefill_started(self.request.id)
        count = self.sequence.num_computed // block_size
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
