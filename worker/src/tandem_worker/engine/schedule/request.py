"""A request inside the engine: one `Sequence` per choice, each a small state machine.

    PARKED ──▶ WAITING ◀──▶ RUNNING ──▶ HELD
                │ │            ▲          │
                │ └◀▶ RECEIVING ┘         │      every state ──▶ FINISHED
                └◀▶ LOADING

PARKED choices wait for the first open one to compute the prompt that they share. WAITING ones hold no blocks. RECEIVING
ones hold the blocks that a prefill worker writes to and cost no compute; until the prefill worker has begun, others may
take these blocks from them. LOADING ones hold cached blocks and those that a tier of this worker writes to, outside the
queue; others may take them too. RUNNING ones are prefilling or decoding. HELD is the prefill side's end: computed,
blocks kept until they are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tandem_worker.engine.schedule.params import Grammar, SamplingParams
from tandem_worker.engine.schedule.prefix_cache import extend_chain
from tandem_worker.engine.trace import RequestTrace
from tandem_worker.model.pooling import Pooling


class SequenceState(Enum):
    PARKED = "parked"
    WAITING = "waiting"
    RECEIVING = "receiving"
    LOADING = "loading"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


_NEXT_STATES = {
    SequenceState.PARKED: {SequenceState.WAITING, SequenceState.RUNNING},
    SequenceState.WAITING: {SequenceState.RECEIVING, SequenceState.RUNNING, SequenceState.LOADING},
    SequenceState.LOADING: {SequenceState.WAITING},
    SequenceState.RECEIVING: {SequenceState.RUNNING, SequenceState.WAITING},
    SequenceState.RUNNING: {SequenceState.WAITING, SequenceState.HELD},
    SequenceState.HELD: set[SequenceState](),
    SequenceState.FINISHED: set[SequenceState](),
}


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What the choices of one request share."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival: float
    """Seconds; with the priority it decides the order."""
    chain_root: bytes
    prompt_chain: list[bytes]
    """Names of the prompt's full blocks."""
    n: int = 1
    priority: float = 0
    cache_salt: str = ""
    endpoints: tuple[str, ...] = ()
    kv_source: str = ""
    """As in `GenerationRequest`, and the next."""
    kv_source_tokens: int = 0
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    serves_peer: bool = False
    """Prefill side of disaggregation: the prompt is computed for another worker and not continued here."""
    admitted: bool = False
    """It has had blocks before."""
    num_uncached: int = 0
    """Prompt tokens that were not cached when it came, where first tokens have a target."""
    set_back: bool = False
    """It was late whatever happened, and is behind those that were not."""
    num_cached_tokens: int = 0
    """Prompt tokens that nobody computed for this request."""
    prefill_worker: str | None = None
    generation: int = 0
    """Number of the remote prefill under way; what arrives under an older one is dropped."""
    resumed: tuple[tuple[int, ...] | None, ...] | None = None
    """As in `GenerationRequest`."""
    grammars: tuple[Grammar | None, ...] = ()
    """Grammars of a resumed request's choices, which have accepted their tokens."""
    step_seconds: float | None = None
    """As in `GenerationRequest`."""
    trace: RequestTrace | None = None
    """As in `GenerationRequest`."""
    prediction: tuple[int, ...] = ()
    """As in `GenerationRequest`."""
    literals: Any = None
    """As in `GenerationRequest`."""
    prompt_index: Any = None
    """Index of the prompt, for guesses: belongs to `engine.guess`, and is the same for all choices."""
    prediction_index: Any = None
    """The same of the prediction."""
    choices: list[Sequence] = field(default_factory=list["Sequence"])
    """Empty when all have ended: each names its request, and a cycle would keep the prompt until Python looks for
    those, which it does rarely."""

    @property
    def starts_on_host(self) -> bool:
        """Between the prompt's logits and the second token there is something that only the host can do."""
        return self.n > 1 or self.serves_peer or self.prompt_logprobs is not None or self.sampling.max_tokens == 0

    @property
    def reads_every_position(self) -> bool:
        """The prompt's every row is looked at: cached blocks, which have none, are of no use."""
        return self.prompt_logprobs is not None or self.pooling in (Pooling.MEAN, Pooling.CLS)

    @property
    def num_open(self) -> int:
        """Choices that have not finished."""
        return sum(1 for choice in self.choices if choice.state is not SequenceState.FINISHED)


class Sequence:
    """One choice: its tokens, how many of them have their KV computed, and where that is.

    Invariants: `num_computed <= num_planned`, and the two are equal unless a step under way computes this sequence;
    `num_computed <= num_tokens`, while `num_planned` may count tokens that are chosen but not known here yet; while
    RUNNING, `block_ids` covers `num_planned` tokens and chunks begin at block boundaries; `chain` names at least the
    first `num_named` blocks.
    """

    __slots__ = (
        "block_ids",
        "chain",
        "choice",
        "chosen_at",
        "decoding",
        "guessing",
        "key",
        "last_input",
        "lead",
        "load_asks",
        "load_tried",
        "lockstep",
        "num_computed",
        "num_loads",
        "num_named",
        "num_planned",
        "num_prompt",
        "num_resumed",
        "num_synced",
        "output",
        "overdue",
        "prompt",
        "queued_tokens",
        "request",
        "retry_required",
        "row",
        "sampler_state",
        "state",
    )

    def __init__(self, request: Request, choice: int, key: tuple[float, int, int]) -> None:
        self.request = request
        self.choice = choice
        self.key = key
        """Order of service, unique: smaller runs first, larger is preempted first."""
        self.state = SequenceState.WAITING if choice == 0 else SequenceState.PARKED
        self.prompt = request.prompt
        self.num_prompt = len(request.prompt)
        self.last_input = self.num_prompt + request.sampling.max_tokens - 1
        """Position of the token that is never computed: the answer's last."""
        self.output: list[int] = []
        self.num_resumed = 0
        """Leading tokens of `output` that were chosen elsewhere."""
        self.num_computed = 0
        """Tokens whose KV finished steps have computed."""
        self.num_planned = 0
        """The same, with those of the steps under way."""
        self.decoding = False
        """All tokens but the newest are computed or planned: the next step is one token."""
        self.lockstep = False
        """The host must see each token of this sequence before the next one can be chosen."""
        self.block_ids: list[int] = []
        self.chain: list[bytes] = request.prompt_chain
        self.num_named = 0
        """Leading blocks that are in the prefix cache (under this block or an equal one)."""
        self.row = -1
        """Index among the running sequences, dense; the engine keeps the block table there."""
        self.num_synced = 0
        """Leading entries of `block_ids` that the engine's block table has."""
        self.queued_tokens = 0
        """This sequence's share of the scheduler's count of prompt tokens to be computed."""
        self.load_asks = 0
        self.num_loads = 0
        """How often blocks were brought for it."""
        self.load_tried = False
        """Tiers were asked for its blocks."""
        self.overdue = False
        """The prefill worker takes long to begin."""
        self.retry_required = 0
        """Blocks this sequence lacked when it was last refused; 0 when it was not."""
        self.chosen_at = 0
        """Place of this sequence's newest token among those that the step under way chooses."""
        self.sampler_state: Any = None
        """Belongs to the engine's sampler; survives preemption."""
        self.guessing: Any = None
        """Belongs to whoever guesses this sequence's next tokens (`engine.guess`); survives preemption."""
        self.lead = 0.0
        """Tokens that it is ahead of where it would be without guesses, and may lose to those of others; below 0 it has
        lost too many."""

    def __lt__(self, other: Sequence) -> bool:
        return self.key < other.key

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.num_prompt + len(self.output)

    @property
    def next_position(self) -> int:
        """Position of the token that is chosen next: behind all that are known, and those that are planned."""
        return max(self.num_planned, self.num_tokens)

    @property
    def most_guesses(self) -> int:
        """Tokens that can be guessed behind the newest one, which is planned: those whose successor is wanted too. 0
        while the newest token is not known here."""
        return self.last_input - self.num_planned if self.num_planned == self.num_tokens else 0

    @property
    def under_way(self) -> bool:
        """A step that is not finished reads and writes this sequence's blocks."""
        return self.num_planned > self.num_computed

    def move_to(self, state: SequenceState) -> None:
        """Change the state. The transitions that are allowed stand at the top of this module."""
        assert state is SequenceState.FINISHED or state in _NEXT_STATES[self.state], f"{self.state} to {state}"
        self.state = state

    def slice_tokens(self, start: int, end: int) -> list[int]:
        """Tokens `start` to `end`, prompt and output as one."""
        boundary = self.num_prompt
        if start >= boundary:
            return self.output[start - boundary : end - boundary]
        if end <= boundary:
            return list(self.prompt[start:end])
        return [*self.prompt[start:], *self.output[: end - boundary]]

    def name_blocks(self, count: int, block_size: int) -> list[bytes]:
        """The chain, extended to name the first `count` blocks."""
        known = len(self.chain)
        if count > known:
            parent = self.chain[-1] if known else self.request.chain_root
            added = extend_chain(parent, self.slice_tokens(known * block_size, count * block_size), block_size)
            if self.chain is self.request.prompt_chain:
                self.chain = [*self.chain, *added]
            else:
                self.chain.extend(added)
        return self.chain
