"""Choosing tokens without leaving the device: what `host_sampler.HostSampler` computes, by the kernels.

The parameters of a batch lie on the device and are made anew only when the batch changes: another sequence, or one that
reaches its minimum length. A step then launches the same few kernels, and only positions and token counts move on, in
place. Grammars are the exception: the host writes their bitmasks for every token.

Guesses of all sequences are checked at once: each row is chosen from as if the guesses before it were right, and the
device counts by itself how many were, so that positions and counts are those of what was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from tandem_worker import kernels
from tandem_worker.engine.sample.contract import LEAST_TEMPERATURE, NO_TOKEN, CheckedRows
from tandem_worker.engine.sample.host_sampler import score_prompt
from tandem_worker.engine.sample.masks import MaskCredit
from tandem_worker.engine.sample.state import SamplingState
from tandem_worker.engine.schedule.params import SamplingParams, TokenLogprob
from tandem_worker.engine.schedule.request import Sequence
from tandem_worker.host.uploads import upload, upload_rows

_NO_GUESS = -2
"""No token, and no want of one."""
_MAX_TOP = 20
"""Likeliest tokens that the logprob kernel reports."""


@dataclass(slots=True, kw_only=True)
class _Counts:
    """What penalties look at, for the rows of the batch that have them."""

    rows: torch.Tensor  # [P] int64, their rows of the logits
    seen: torch.Tensor  # [P, V] bool, tokens of the prompt
    output: torch.Tensor  # [P, V] int32, how often each token was chosen
    presence: torch.Tensor  # [P]
    frequency: torch.Tensor  # [P]
    repetition: torch.Tensor  # [P]


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Parameters of the sequences that are sampled together."""

    states: list[SamplingState]
    next_positions: list[int]
    """Positions in the coming step, as the host knows them: the least."""
    last_positions: list[int]
    """The largest: where guesses were checked, the device alone has counted the right ones."""
    changes_at: list[int]
    """Position at which a row's minimum length is reached; 0 when it is."""
    seeds: torch.Tensor
    choices: torch.Tensor
    positions: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    counts: _Counts | None
    bias: tuple[torch.Tensor, torch.Tensor] | None
    has_grammar: bool

    def continues(self, states: list[SamplingState], positions: list[int]) -> bool:
        """Whether a step with these follows the last one."""
        return (
            states == self.states
            and all(map(_between, self.next_positions, positions, self.last_positions))
            and all(not end or position < end for position, end in zip(positions, self.changes_at, strict=True))
        )


@dataclass(slots=True, kw_only=True)
class _Layout:
    """The rows of each sequence, where guesses are checked: N sequences with up to W rows each, R in all."""

    owners: torch.Tensor  # [R] int64
    places: torch.Tensor  # [R] int64, 0 for the newest token's row
    grid: torch.Tensor  # [N, W] int64, rows; R where there is none
    guesses: torch.Tensor  # [N, W] int64, what is guessed to be chosen there


def _between(least: int, value: int, most: int) -> bool:
    """Whether a value is within these two, both included."""
    return least <= value <= most


class DeviceSampler:
    """`Sampler` by kernels."""

    checks_at_once = True

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._credit = MaskCredit()
        self._batch: _Batch | None = None
        self.num_rebuilt = 0
        """How often parameters were made anew."""

    def choose_tokens(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
        """As `HostSampler.choose_tokens`; the host waits for nothing."""
        if not sequences:  # a step of unfinished prompts
            return torch.empty(0, dtype=torch.int64, device=self._device)
        positions = [sequence.next_position for sequence in sequences]
        batch = self._continue(sequences, positions)
        edited = self._edit(logits, batch)
        tokens = kernels.sample_tokens(
            edited,
            batch.seeds,
            batch.choices,
            batch.positions,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
        )
        batch.positions += 1
        batch.next_positions = batch.last_positions = [position + 1 for position in positions]
        if batch.counts is not None:
            chosen = tokens[batch.counts.rows].clamp(min=0)[:, None]
            batch.counts.output.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.int32))
        return tokens

    def choose_checked(self, logits: torch.Tensor, checked: Rows[CheckedRows]) -> torch.Tensor:
        """As the protocol says; the host waits for nothing."""
        sequences = [each.sequence for each in checked]
        positions = [sequence.num_tokens for sequence in sequences]
        batch = self._continue(sequences, positions)
        widths = [1 + len(each.guesses) for each in checked]
        rows = [each.row + place for each, width in zip(checked, widths, strict=True) for place in range(width)]
        if rows != list(range(logits.shape[0])):
            logits = logits[upload(np.array(rows, dtype=np.int64), self._device)]
        layout = self._lay_out(checked, widths)
        tokens = kernels.sample_tokens(
            self._edit_checked(logits, batch, checked, layout),
            batch.seeds[layout.owners],
            batch.choices[layout.owners],
            batch.positions[layout.owners] + layout.places,
            batch.temperature[layout.owners],
            batch.top_k[layout.owners],
            batch.top_p[layout.owners],
            batch.min_p[layout.owners],
        )
        self._move_on(batch, tokens, layout)
        batch.next_positions = [position + 1 for position in positions]
        batch.last_positions = [position + width for position, width in zip(positions, widths, strict=True)]
        return tokens

    def compute_logprobs(
        self, logits: torch.Tensor, sequences: Rows[Sequence], tokens: list[int]
    ) -> dict[int, TokenLogprob]:
        """As `HostSampler.compute_logprobs`, for all rows at once."""
        wanted = {
            row: sequence.sampler_state.params.num_logprobs
            for row, sequence in enumerate(sequences)
            if sequence.sampler_state.params.num_logprobs is not None and tokens[row] != NO_TOKEN
        }
        if not wanted:
            return {}
        most = min(max(wanted.values()), logits.shape[1])
        if most > _MAX_TOP:
            return {row: score_prompt(logits[row : row + 1], [tokens[row]], top)[0] for row, top in wanted.items()}
        rows = list(wanted)
        index, chosen = upload_rows([rows, [tokens[row] for row in rows]], np.int64, self._device)
        reported = min(most if most < 2 else _MAX_TOP, logits.shape[1])  # each number is a kernel of its own
        own, top, ids = kernels.token_logprobs(logits[index], chosen, reported)
        return {
            row: TokenLogprob(
                token_id=tokens[row],
                logprob=logprob,
                top=tuple(zip(top_ids[: wanted[row]], values[: wanted[row]], strict=True)),
            )
            for row, logprob, values, top_ids in zip(rows, own.tolist(), top.tolist(), ids.tolist(), strict=True)
        }

    def _edit(self, logits: torch.Tensor, batch: _Batch) -> torch.Tensor:
        """Penalties, bias with minimum length, and grammars, on a copy where there is any of them."""
        counts = batch.counts
        if counts is None and batch.bias is None and not batch.has_grammar:
            return logits
        edited = logits.clone()
        if counts is not None:
            penalized = edited[counts.rows]
            kernels.apply_penalties(
                penalized, counts.seen, counts.output, counts.presence, counts.frequency, counts.repetition
            )
            edited[counts.rows] = penalized
        if batch.bias is not None:
            kernels.apply_logit_bias(edited, *batch.bias)
        if batch.has_grammar:
            kernels.apply_bitmask(edited, self._bitmask(batch.states))
        return edited

    def _bitmask(self, states: list[SamplingState]) -> torch.Tensor:
        """What grammars allow, `[N, ceil(V / 32)]`; other rows allow everything."""
        mask = torch.full((len(states), -(-self._vocab // 32)), -1, dtype=torch.int32)
        self._credit.fill([(state, mask[row]) for row, state in enumerate(states) if state.grammar is not None])
        return upload(mask, self._device)

    # -- guesses -------------------------------------------------------------------------------------------------

    def _lay_out(self, checked: Rows[CheckedRows], widths: list[int]) -> _Layout:
        shape = len(checked), max(widths)
        grid = np.full(shape, sum(widths), dtype=np.int64)  # where there is no row: the one behind the last
        guesses = np.full(shape, _NO_GUESS, dtype=np.int64)
        first = 0
        for index, (each, width) in enumerate(zip(checked, widths, strict=True)):
            grid[index, :width] = range(first, first + width)
            guesses[index, : width - 1] = each.guesses
            first += width
        owners = np.repeat(np.arange(len(checked)), widths)
        places = np.concatenate([np.arange(width) for width in widths])
        flat = upload_rows([owners, places, grid.ravel(), guesses.ravel()], np.int64, self._device)
        return _Layout(owners=flat[0], places=flat[1], grid=flat[2].view(shape), guesses=flat[3].view(shape))

    def _edit_checked(
        self, logits: torch.Tensor, batch: _Batch, checked: Rows[CheckedRows], layout: _Layout
    ) -> torch.Tensor:
        """Penalties, bias and minimum length of each row, as if the guesses before it were in the answer."""
        assert not batch.has_grammar, "the host writes a mask when it knows the token before"
        counts, bias = batch.counts, batch.bias
        if any(batch.changes_at):  # it may end at any of a sequence's rows
            bias = self._build_bias(*_list_ends(batch, checked))
        elif bias is not None:
            bias = bias[0][layout.owners], bias[1][layout.owners]
        if counts is None and bias is None:
            return logits
        edited = logits.clone()
        if counts is not None:
            self._penalize_checked(edited, counts, batch.states, checked)
        if bias is not None:
            kernels.apply_logit_bias(edited, *bias)
        return edited

    def _penalize_checked(
        self, edited: torch.Tensor, counts: _Counts, states: list[SamplingState], checked: Rows[CheckedRows]
    ) -> None:
        rows: list[int] = []
        owners: list[int] = []
        said: list[tuple[int, int]] = []
        """Row among the penalized ones, and a guess before it."""
        first, owner = 0, 0
        for state, each in zip(states, checked, strict=True):
            width = 1 + len(each.guesses)
            if state.penalizes:
                for place in range(width):
                    said += [(len(rows), guess) for guess in each.guesses[:place]]
                    rows.append(first + place)
                    owners.append(owner)
                owner += 1
            first += width
        index, owned, where, tokens = upload_rows(
            [rows, owners, [row for row, _ in said], [token for _, token in said]], np.int64, self._device
        )
        output = counts.output[owned]
        output.index_put_((where, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
        penalized = edited[index]
        kernels.apply_penalties(
            penalized,
            counts.seen[owned],
            output,
            counts.presence[owned],
            counts.frequency[owned],
            counts.repetition[owned],
        )
        edited[index] = penalized

    @staticmethod
    def _move_on(batch: _Batch, tokens: torch.Tensor, layout: _Layout) -> None:
        """Positions and counts behind what is accepted: a token, and one for each right guess up to a wrong one."""
        chosen = torch.cat((tokens, tokens.new_full((1,), NO_TOKEN)))[layout.grid]
        right = (chosen == layout.guesses).long().cumprod(1)
        batch.positions += 1 + right.sum(1)
        if batch.counts is not None:
            accepted = torch.cat((torch.ones_like(right[:, :1]), right[:, :-1]), dim=1)[batch.counts.rows]
            batch.counts.output.scatter_add_(1, chosen[batch.counts.rows].clamp(min=0), accepted.int())

    # -- building a batch ----------------------------------------------------------------------------------------

    def _continue(self, sequences: Rows[Sequence], positions: list[int]) -> _Batch:
        """Parameters of these sequences, the next token of each being at its position."""
        states: list[SamplingState] = [sequence.sampler_state for sequence in sequences]
        batch = self._batch
        if batch is None or not batch.continues(states, positions):
            batch = self._batch = self._build(states, positions, sequences)
        return batch

    def _build(self, states: list[SamplingState], positions: list[int], sequences: Rows[Sequence]) -> _Batch:
        self.num_rebuilt += 1
        self._release_counts()
        params = [state.params for state in states]
        seeds = np.array([param.seed & ((1 << 64) - 1) for param in params], dtype=np.uint64).view(np.int64)
        choices = [sequence.choice for sequence in sequences]
        top_k = [param.top_k for param in params]
        whole = upload_rows([seeds, choices, positions, top_k], np.int64, self._device)
        chances = ([_heat(p) for p in params], [p.top_p for p in params], [p.min_p for p in params])
        real = upload_rows(chances, np.float32, self._device)
        ends = [
            sequence.num_prompt + param.min_tokens if position - sequence.num_prompt < param.min_tokens else 0
            for sequence, param, position in zip(sequences, params, positions, strict=True)
        ]
        return _Batch(
            states=states,
            next_positions=positions,
            last_positions=positions,
            changes_at=ends,
            seeds=whole[0],
            choices=whole[1],
            positions=whole[2],
            top_k=whole[3],
            temperature=real[0],
            top_p=real[1],
            min_p=real[2],
            counts=self._build_counts(states, sequences),
            bias=self._build_bias(states, ends),
            has_grammar=any(state.grammar is not None for state in states),
        )

    def _build_counts(self, states: list[SamplingState], sequences: Rows[Sequence]) -> _Counts | None:
        rows = [row for row, state in enumerate(states) if state.penalizes]
        if not rows:
            return None
        seen = torch.zeros((len(rows), self._vocab), dtype=torch.bool, device=self._device)
        output = torch.zeros((len(rows), self._vocab), dtype=torch.int32, device=self._device)
        for place, row in enumerate(rows):
            state, sequence = states[row], sequences[row]
            seen[place].index_fill_(0, upload(np.array(sequence.prompt, dtype=np.int64), self._device), True)
            if state.kept_counts is not None:
                output[place] = state.kept_counts
                state.kept_counts = None
            elif sequence.output:
                known = np.bincount(sequence.output, minlength=self._vocab).astype(np.int32)
                output[place] = upload(known, self._device)
        params = [states[row].params for row in rows]
        table = (
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
            [p.repetition_penalty for p in params],
        )
        penalties = upload_rows(table, np.float32, self._device)
        return _Counts(
            rows=upload(np.array(rows, dtype=np.int64), self._device),
            seen=seen,
            output=output,
            presence=penalties[0],
            frequency=penalties[1],
            repetition=penalties[2],
        )

    def _release_counts(self) -> None:
        """Leave the counts of the batch that ends with its states: the tokens in them may not be known here yet."""
        batch = self._batch
        if batch is None or batch.counts is None:
            return
        penalized = (state for state in batch.states if state.penalizes)
        for state, counts in zip(penalized, batch.counts.output.unbind(), strict=True):
            state.kept_counts = counts.clone()

    def _build_bias(self, states: list[SamplingState], ends: list[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logit bias, and -inf for what would stop a row before its minimum length."""
        biases: list[dict[int, float]] = []
        for state, end in zip(states, ends, strict=True):
            bias = dict(state.params.logit_bias)
            if end:
                bias |= dict.fromkeys(state.stop_token_ids, -float("inf"))
            biases.append(bias)
        width = max(map(len, biases))
        if width == 0:
            return None
        ids = np.full((len(states), width), -1, dtype=np.int64)
        values = np.zeros((len(states), width), dtype=np.float32)
        for row, bias in enumerate(biases):
            ids[row, : len(bias)] = list(bias)
            values[row, : len(bias)] = list(bias.values())
        return upload(ids, self._device), upload(values, self._device)


def _list_ends(batch: _Batch, checked: Rows[CheckedRows]) -> tuple[list[SamplingState], list[int]]:
    """Each row's sequence's state, and where its minimum length is reached; 0 where it is."""
    states: list[SamplingState] = []
    ends: list[int] = []
    for state, end, each in zip(batch.states, batch.changes_at, checked, strict=True):
        for position in range(each.sequence.num_tokens, each.sequence.num_tokens + 1 + len(each.guesses)):
            states.append(state)
            ends.append(end if position < end else 0)
    return states, ends


def _heat(params: SamplingParams) -> float:
    return 0.0 if params.greedy else max(params.temperature, LEAST_TEMPERATURE)
