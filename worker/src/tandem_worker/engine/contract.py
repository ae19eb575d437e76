"""The engine as the server and the transfer layer see it. All methods may be called from any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem_worker.engine.schedule.params import GenerationRequest, TokenDelta
from tandem_worker.engine.trace import Hop, RequestTrace

DeliverFunction = Callable[[Sequence[TokenDelta]], None]
"""Called on the engine thread once per step with all deltas of that step; must return quickly and never raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStats:
    """Blocks in host memory."""

    blocks_total: int
    blocks_stored: int
    horizon: float
    """As `kv_eviction_horizon`: of what host memory gave up."""
    blocks_out_total: int
    blocks_in_total: int
    seconds_out_total: float
    seconds_in_total: float
    evictions_total: int
    bytes_per_block: int
    """On this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Figures for telemetry; see `tandem_api.telemetry.WorkerTelemetry` for units."""

    running_requests: int
    queued_requests: int
    running_tokens: int
    queued_prefill_tokens: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_total: int
    kv_blocks_touched: int
    kv_block_size: int
    kv_eviction_horizon: float
    prefill_tokens_per_second: float | None
    decode_step_seconds: float | None
    mixed_step_seconds: float | None
    busy_seconds_total: float
    prefill_seconds_total: float
    computed_prompt_tokens_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    steps_total: int
    prefills_local_total: int
    prefills_remote_total: int
    prefills_fallback_total: int
    decode_tokens_per_step: float = 1.0
    draft_tokens_total: Mapping[str, int] = field(default_factory=dict[str, int])
    """Guesses that were checked, by source; empty where nobody guesses."""
    accepted_draft_tokens_total: Mapping[str, int] = field(default_factory=dict[str, int])
    guess_seconds_total: float | None = None
    """None where nobody guesses, as are those that follow."""
    guess_bytes: int | None = None
    """Memory of what guesses are made from, beside what belongs to requests that run."""
    decode_token_seconds: float | None = None
    plain_step_seconds: float | None = None
    mixed_token_seconds: float | None = None
    host: HostStats | None = None
    """None: there is no host memory below the device's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefill:
    """Work order of a decode engine to its `PrefillClient`: fill these reserved blocks."""

    request_id: str
    generation: int
    """Counts attempts of the same request; what arrives for an older one is dropped."""
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    """Leading tokens whose blocks are already here; a multiple of the block size."""
    block_ids: tuple[int, ...]
    """Reserved blocks of the whole prompt, in order, cached ones included; those are not to be written."""
    endpoints: tuple[str, ...]
    kv_source: str = ""
    """As in `GenerationRequest`, and the next."""
    kv_source_tokens: int = 0
    cache_salt: str
    priority: float
    prompt_name: bytes = b""
    """`prefix_cache.name_prompt` of the prompt: what the prefill end must have computed. It is not told, and has none
    here."""
    trace: RequestTrace | None = None
    """Takes the times of the request that it is for are noted, at either end; None: it is not traced."""
    hop: Hop | None = None
    """Span of the endpoint that is tried; its context alone is told to the prefill end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefillResult:
    request_id: str
    generation: int
    logits: bytes
    """float32 logits of the last prompt position, `vocab_size * 4` bytes: sampling stays with the decode worker."""
    num_cached_tokens: int
    """Prompt tokens that neither worker computed."""
    worker: str
    """Pod name of the prefill worker."""


class PrefillClient(Protocol):
    """Decode side of disaggregation (implemented in `transfer/`)."""

    def start(self, order: RemotePrefill) -> None:
        """Begin. Ends in one call of `Engine.remote_prefill_done` or `remote_prefill_failed`, unless cancelled.

        `remote_prefill_overdue` comes before where the prefill worker takes long to begin.
        """
        ...

    def has_begun(self, request_id: str, generation: int) -> bool:
        """Whether the prefill worker computes it. False: its reserved blocks are there for others, who `cancel` it."""
        ...

    def cancel(self, request_id: str, generation: int) -> None:
        """Abandon. When this returns no byte of that generation will be written any more."""
        ...


class LayerListener(Protocol):
    """Prefill side of disaggregation (implemented in `transfer/`): told what may be sent."""

    def blocks_ready(self, request_id: str, layer: int, first_index: int, block_ids: Sequence[int]) -> None:
        """Layer `layer` of these consecutive prompt blocks is complete (block `first_index` of the prompt first).

        Called on the engine thread between layers: must only enqueue. The blocks stay allocated until
        `Engine.release`.
        """
        ...

    def prefill_started(self, request_id: str) -> None:
        """The prompt has blocks now, and its first chunk is about to be computed. Comes before any block."""
        ...

    def prefill_done(self, request_id: str, logits: bytes, num_cached_tokens: int, prompt_name: bytes) -> None:
        """`prompt_name` is `prefix_cache.name_prompt` of what was computed."""
        ...

    def prefill_failed(self, request_id: str, message: str) -> None:
        """The prompt will not be computed; `message` says why, for the decode worker. Nothing follows."""
        ...


class PrefillEngine(Protocol):
    """What the prefill end of a transport asks of an engine."""

    def submit_prefill(self, order: RemotePrefill, listener: LayerListener) -> None:
        """Prefill side: compute a prompt for another worker. `order.block_ids` and `endpoints` are empty here.

        Blocks before `order.num_cached_tokens` are not reported to the listener; cached ones after it are, at once.
        """
        ...

    def release(self, request_id: str) -> None:
        """Prefill side: everything has been sent (or the peer is gone); the blocks may be reused (they stay cached)."""
        ...

    def abort(self, request_id: str) -> None:
        """End a prompt that is waiting or being computed. One that has ended is ignored."""
        ...

    def stats(self) -> EngineStats:
        """The figures that the engine thread last left. Any thread; waits for nothing."""
        ...


class DecodeEngine(Protocol):
    """What the decode end of a transport asks of an engine."""

    def remote_prefill_overdue(self, request_id: str, generation: int) -> None:
        """It has waited long at the prefill worker: if others lack its reserved blocks it is prefilled here."""
        ...

    def remote_prefill_done(self, result: RemotePrefillResult) -> None:
        """All blocks are filled: the first token is sampled from `result.logits`. An older generation is ignored."""
        ...

    def remote_prefill_failed(self, request_id: str, generation: int, reason: str) -> None:
        """The engine prefills locally instead and counts a fallback."""
        ...


class Engine(PrefillEngine, DecodeEngine, Protocol):
    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineStoppedError, ContextLengthError, RequestError (429 when the queue is full, 409
        for a resumed one whose tokens are none that could be followed by more).

        The grammars of a resumed request read its tokens again in this call: a microsecond or a few for each.
        """
        ...

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice that has had a token, and free its blocks. What has ended is ignored.

        Delivers a final ABORT delta per choice that was open.
        """
        ...

    def drain(self) -> None:
        """Take no new requests; those inside go on."""
        ...

    @property
    def idle(self) -> bool:
        """No request inside and nothing left to release."""
        ...

    @property
    def graphs_pending(self) -> int:
        """Batch sizes of decode steps that are still to be recorded."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What killed the step loop; None while it is alive."""
        ...
