"""What one choice's sampling remembers between steps: token counts for penalties, and the grammar's state."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tandem_worker.engine.schedule.params import Grammar, SamplingParams
from tandem_worker.engine.schedule.request import Sequence

_WORD_BITS = 32


class SamplingState:
    """Built from the tokens at hand, so that a choice that was moved goes on as it was."""

    __slots__ = (
        "_bias", "_counts", "_mask", "_seen", "credit_is_low", "grammar", "grammar_pace", "grammar_seconds",
        "kept_counts", "params", "plain", "stop_token_ids",
    )  # fmt: skip

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int], grammar: Grammar | None = None) -> None:
        """`grammar` has accepted the tokens of a resumed choice; without it a new one is begun."""
        self.params = params
        self.stop_token_ids = (
            params.stop_token_ids - eos_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids
        )
        begun = params.grammar.new() if params.grammar is not None and grammar is None else None
        self.grammar: Grammar | None = grammar or begun
        self.grammar_seconds = self.grammar.seconds if self.grammar is not None else 0.0
        self.grammar_pace: float | None = None
        """What the grammar had taken at its last mask, and seconds per token lately; `masks` keeps both."""
        self.credit_is_low = False
        """Grammars of all choices had used much of their time when its last mask was written."""
        self.plain = self._is_plain()
        """The likeliest token is the answer and nothing is to be reported about it."""
        self.kept_counts: torch.Tensor | None = None
        """`[vocab]`, how often each token was chosen: the device sampler's while this state is in no batch of it."""
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self._mask: torch.Tensor | None = None

    def _is_plain(self) -> bool:
        params = self.params
        return (
            params.greedy
            and params.num_logprobs is None
            and params.grammar is None
            and not params.logit_bias
            and not self.penalizes
        )

    @property
    def penalizes(self) -> bool:
        """The choice depends on which tokens there were."""
        return self._penalizes_output or self.params.repetition_penalty != 1.0

    @property
    def _penalizes_output(self) -> bool:
        return self.params.presence_penalty != 0.0 or self.params.frequency_penalty != 0.0

    def is_plain_for(self, sequence: Sequence) -> bool:
        """The likeliest token is the answer now: `plain`, and no stop token is to be kept away."""
        least = self.params.min_tokens
        return self.plain and (least == 0 or sequence.next_position - sequence.num_prompt >= least)

    @property
    def needs_host(self) -> bool:
        """The host takes part in every choice (grammar), or reports on it (logprobs)."""
        return self.params.grammar is not None or self.params.num_logprobs is not None

    def count(self, token: torch.Tensor) -> None:
        """Take note of a chosen token (a scalar) where penalties are computed, without waiting for it."""
        token = token.clamp(min=0)
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True

    def accept(self, token_id: int) -> None:
        """Raises what the grammar raises when it forbids the token."""
        if self.grammar is not None:
            self.grammar.accept(token_id)

    def adjust(self, logits: torch.Tensor, sequence: Sequence) -> None:
        """Apply penalties, bias, minimum length and the mask to one row `[vocab]`, in place.

        `prepare_mask` gives the mask that the grammar has filled in by then.
        """
        params = self.params
        if params.repetition_penalty != 1.0:
            if self._seen is None:
                self._seen = _mark((*sequence.prompt, *sequence.output), logits)
            penalized = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            torch.where(self._seen, penalized, logits, out=logits)
        if self._penalizes_output:
            if self._counts is None:
                self._counts = _count(sequence.output, logits)
            logits -= params.frequency_penalty * self._counts
            logits -= params.presence_penalty * (self._counts > 0)
        if params.logit_bias:
            ids, values = self._bias_tensors(logits)
            logits[ids] += values
        if sequence.next_position - sequence.num_prompt < params.min_tokens and self.stop_token_ids:
            logits[list(self.stop_token_ids)] = -torch.inf
        if self.grammar is not None:
            self._apply_mask(logits)

    def _bias_tensors(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._bias is None:
            bias = self.params.logit_bias
            self._bias = (
                torch.tensor(list(bias), device=logits.device),
                torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device),
            )
        return self._bias

    def prepare_mask(self, vocab: int) -> torch.Tensor:
        """For the grammar to fill in."""
        if self._mask is None:
            self._mask = torch.empty(-(-vocab // _WORD_BITS), dtype=torch.int32)
        return self._mask.fill_(-1)

    def _apply_mask(self, logits: torch.Tensor) -> None:
        assert self._mask is not None
        shifts = torch.arange(_WORD_BITS, dtype=torch.int32)
        allowed = ((self._mask[:, None] >> shifts) & 1).bool().view(-1)[: logits.shape[0]]
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)


def _mark(token_ids: Iterable[int], like: torch.Tensor) -> torch.Tensor:
    marks = torch.zeros(like.shape[0], dtype=torch.bool, device=like.device)
    marks[list(token_ids)] = True
    return marks


def _count(token_ids: list[int], like: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(torch.tensor(token_ids, dtype=torch.int64), minlength=like.shape[0])
    return counts.to(like.device, like.dtype)
