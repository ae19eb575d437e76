"""From the logits of a step to tokens, and from tokens to what is delivered.

A request is in `requests`, which its runner shares, from submission until its last choice ends here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import torch

from tandem_worker.engine.block_reports import PeerPrompts
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.execute.batch import LogitsLayout
from tandem_worker.engine.execute.executor import ModelExecutor, may_check_at_once
from tandem_worker.engine.guess.speculator import Speculator
from tandem_worker.engine.outputs import build_final_delta, build_token_delta, decide_outcome, join_deltas
from tandem_worker.engine.remote_prefills import RemotePrefills
from tandem_worker.engine.sample.contract import NO_TOKEN, CheckedRows
from tandem_worker.engine.sample.host_sampler import score_prompt
from tandem_worker.engine.sample.masks import is_quick
from tandem_worker.engine.sample.pooling import Pool
from tandem_worker.engine.schedule.meter import Totals
from tandem_worker.engine.schedule.params import FinishReason, TokenDelta, TokenLogprob
from tandem_worker.engine.schedule.request import Request, Sequence, SequenceState
from tandem_worker.engine.schedule.scheduler import Scheduler
from tandem_worker.host.errors import WorkerError
from tandem_worker.model.pooling import Pooling

if TYPE_CHECKING:
    from tandem_worker.engine.drafting import Drafting

logger = logging.getLogger(__name__)


def count_right(guesses: Items[int], tokens: Items[int]) -> int:
    """Guesses before the first one that is none of its place in `tokens`."""
    pairs = enumerate(zip(guesses, tokens, strict=False))
    return next((place for place, (guess, token) in pairs if guess != token), len(guesses))


_NO_TOKEN_MESSAGE = "the model's output allows no token: it is not a number, or every token is excluded"


class OutputProcessor:
    """Leaves `deltas` for the caller to deliver."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: ModelExecutor,
        *,
        requests: dict[str, Request],
        totals: Totals,
        remote: RemotePrefills,
        peers: PeerPrompts,
        speculator: Speculator | None,
        drafting: Drafting | None,
    ) -> None:
        self.deltas: list[TokenDelta] = []
        self.right: Counter[Sequence] = Counter()
        """How many guesses of the step that is being finished saved one, by choice."""
        self._scheduler = scheduler
        self._executor = executor
        self._requests = requests
        self._totals = totals
        self._remote = remote
        self._peers = peers
        self._speculator = speculator
        self._drafting = drafting
        self._prompt_scores: dict[str, list[TokenLogprob | None]] = {}
        self._pools: dict[str, Pool] = {}

    def take(self) -> list[TokenDelta]:
        """What is to be delivered now."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def abort(self, request_id: str) -> None:
        """End every choice of a request with ABORT. What has ended is ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self.end_request(request, FinishReason.ABORT)

    def abort_choice(self, request_id: str, choice: int) -> None:
        """Before its first token a choice stays: the others wait for the prompt that choice 0 computes."""
        request = self._requests.get(request_id)
        if request is not None and request.choices[choice].output:
            self._end_choice(request.choices[choice], FinishReason.ABORT)

    def disown_all(self, message: str) -> None:
        """The step loop is dead and its state cannot be trusted: only say so to everyone who waits."""
        for request in self._requests.values():
            for choice in request.choices:
                if choice.state is not SequenceState.FINISHED:
                    self.deltas.append(build_final_delta(choice, FinishReason.ERROR, message))
        self._requests.clear()

    def end_request(self, request: Request, reason: FinishReason, error: str | RequestError | None = None) -> None:
        """End every choice that is open."""
        for choice in request.choices:
            self._end_choice(choice, reason, error)

    def _end_choice(self, sequence: Sequence, reason: FinishReason, error: str | RequestError | None = None) -> None:
        if sequence.state is SequenceState.FINISHED:
            return
        self.deltas.append(build_final_delta(sequence, reason, error))
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        """Free what the choice holds, and forget the request with its last choice."""
        request = sequence.request
        if sequence.state is SequenceState.RECEIVING:
            self._remote.cancel(sequence)  # no late write may hit a freed block
        if sequence.state is SequenceState.LOADING and self._scheduler.hooks.loads is not None:
            self._scheduler.hooks.loads.cancel(sequence)
        self._scheduler.finish(sequence)
        sequence.sampler_state = None
        if self._speculator is not None:
            self._speculator.forget(sequence)
        if request.num_open == 0:
            if request.trace is not None:
                request.trace.note_end(sum(len(choice.output) - choice.num_resumed for choice in request.choices))
            self._prompt_scores.pop(request.id, None)
            self._pools.pop(request.id, None)
            self._requests.pop(request.id, None)
            request.choices = []

    # -- logits to tokens ----------------------------------------------------------------------------------------

    def accept_step(self, layout: LogitsLayout, logits: torch.Tensor, checked: list[int] | None = None) -> None:
        """What a step has computed: scores and vectors of prompts, the next tokens, and the guesses among them.

        `checked`: tokens at all places, where they were chosen at launch."""
        for chunk, first in layout.scored:
            rows = logits[first : first + chunk.length]
            if chunk.sequence.request.pooling is not None:
                self._pools.setdefault(chunk.sequence.request.id, Pool()).add(chunk.start, rows)
            else:
                self._score_chunk(chunk.sequence, chunk.start, rows)
        first = len(self.deltas)
        if layout.waves:
            self._accept_guessed(layout, logits, checked)
            self.deltas[first:] = join_deltas(self.deltas[first:])
        elif layout.sequences:
            self.accept_logits(layout.sequences, logits if layout.rows is None else logits[layout.rows])

    def _accept_guessed(self, layout: LogitsLayout, logits: torch.Tensor, tokens: list[int] | None) -> None:
        """The next tokens of a step with guesses, all at once or wave by wave."""
        sampler = self._executor.sampler
        if tokens is not None or (sampler.checks_at_once and self._drafting is None):
            checked = layout.checked
            if tokens is None and may_check_at_once(sampler, checked):
                tokens = sampler.choose_checked(logits, checked).tolist()
            if tokens is not None:
                self._accept_checked(checked, logits, tokens)
                return
        self.accept_logits(layout.sequences, logits if layout.rows is None else logits[layout.rows])
        self._check_guesses(layout, logits)

    def _accept_checked(self, checked: list[CheckedRows], logits: torch.Tensor, tokens: list[int]) -> None:
        """`tokens` are those at the places of `checked`: deliver each sequence's up to the first that was guessed
        otherwise, or ends it."""
        logprobs = self._score_checked(checked, logits, tokens)
        first = 0
        for each in checked:
            sequence = each.sequence
            for place in range(1 + count_right(each.guesses, tokens[first:])):
                if sequence.state is not SequenceState.RUNNING:
                    break
                if place:
                    self._scheduler.confirm(sequence)
                    self.right[sequence] += 1
                self._accept_token(sequence, tokens[first + place], logprobs.get(first + place))
            first += 1 + len(each.guesses)

    def _score_checked(
        self, checked: list[CheckedRows], logits: torch.Tensor, tokens: list[int]
    ) -> dict[int, TokenLogprob]:
        """Logprobs of the tokens, by their place among `tokens`; of those that may be accepted and ask for them."""
        places: list[int] = []
        rows: list[int] = []
        sequences: list[Sequence] = []
        first = 0
        for each in checked:
            if each.sequence.sampler_state.params.num_logprobs is not None:
                count = 1 + count_right(each.guesses, tokens[first:])
                places += range(first, first + count)
                rows += range(each.row, each.row + count)
                sequences += [each.sequence] * count
            first += 1 + len(each.guesses)
        if not rows:
            return {}
        chosen = [tokens[place] for place in places]
        scored = self._executor.sampler.compute_logprobs(logits[rows], sequences, chosen)
        return {places[index]: logprob for index, logprob in scored.items()}

    def _check_guesses(self, layout: LogitsLayout, logits: torch.Tensor) -> None:
        """Go on with the choices whose next token was guessed, wave by wave: for each it is as one step more.

        So whatever the choice of a token depends on (penalties, a grammar, the end) is as it would be without guesses.
        Who has a grammar whose last mask took long, or left little time to all, gets no more of them in this step.
        """
        right = set(layout.sequences)
        """Choices whose guesses have all been right so far."""
        for wave in layout.waves:
            rows: dict[Sequence, int] = {}
            for sequence, (guess, row) in wave.items():
                if sequence not in right or sequence.state is not SequenceState.RUNNING:
                    continue
                if sequence.output[-1] == guess and is_quick(sequence.sampler_state):
                    rows[sequence] = row
            if not rows:
                return
            right = set(rows)
            if self._drafting is not None:
                self._drafting.keep_guesses(wave, list(rows))
            for sequence in rows:
                self._scheduler.confirm(sequence)
            self.right.update(right)
            self.accept_logits(list(rows), logits[list(rows.values())])

    def _score_chunk(self, sequence: Sequence, start: int, logits: torch.Tensor) -> None:
        request = sequence.request
        scores = self._prompt_scores.setdefault(request.id, [None])
        del scores[start + 1 :]  # after a preemption the prompt is computed again
        targets = list(request.prompt[start + 1 : start + 1 + logits.shape[0]])
        scores.extend(score_prompt(logits[: len(targets)], targets, request.prompt_logprobs or 0))

    def accept_logits(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Choose and deliver the next token of each sequence; row i of `logits` is sequence i's."""
        sequences, logits = self._expand(sequences, logits)
        if not sequences:
            return
        sampler = self._executor.sampler
        tokens: list[int] = sampler.choose_tokens(logits, sequences).tolist()
        logprobs = sampler.compute_logprobs(logits, sequences, tokens)
        for row, sequence in enumerate(sequences):
            self._accept_token(sequence, tokens[row], logprobs.get(row))

    def accept_chosen(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """Deliver tokens that were chosen at launch. Those of choices that have ended since are dropped."""
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.state is SequenceState.FINISHED:
                continue
            if not sequence.output:
                self._count_prompt(sequence.request)
            self._accept_token(sequence, token, None)

    def _expand(self, sequences: list[Sequence], logits: torch.Tensor) -> tuple[list[Sequence], torch.Tensor]:
        """Take out what is not sampled here, and repeat the row of a prompt that several choices continue.

        A choice may have ended in the step before, whose tokens were not known when this one was planned.
        """
        if all(sequence.output and sequence.state is not SequenceState.FINISHED for sequence in sequences):
            return sequences, logits
        rows: list[int] = []
        expanded: list[Sequence] = []
        for row, sequence in enumerate(sequences):
            if sequence.state is SequenceState.FINISHED:
                continue
            forks = not sequence.output and sequence.request.resumed is None
            for choice in self._first_choices(sequence, logits[row]) if forks else [sequence]:
                rows.append(row)
                expanded.append(choice)
        if rows == list(range(logits.shape[0])):
            return expanded, logits
        return expanded, logits[rows]

    def _first_choices(self, sequence: Sequence, row: torch.Tensor) -> list[Sequence]:
        """A prompt is computed: who continues it here."""
        request = sequence.request
        self._count_prompt(request)
        if request.serves_peer:
            self._peers.finish(request, self._executor.dump_logits(row))
            return []
        if request.pooling is not None:
            self._deliver_embedding(sequence, row)
            return []
        if request.sampling.max_tokens == 0:
            scores = self._take_prompt_scores(request)
            for choice in request.choices:
                self.deltas.append(build_final_delta(choice, FinishReason.LENGTH, prompt_logprobs=scores))
                self._close(choice)
            return []
        self._scheduler.fork(request)
        return list(request.choices)

    def _count_prompt(self, request: Request) -> None:
        self._totals.prompt_tokens += len(request.prompt)
        self._totals.cached_tokens += request.num_cached_tokens
        if request.trace is not None:
            request.trace.note_prompt(len(request.prompt), request.num_cached_tokens)
        if not request.generation and not request.serves_peer:
            self._totals.prefills_local += 1

    def _deliver_embedding(self, sequence: Sequence, row: torch.Tensor) -> None:
        request = sequence.request
        assert request.pooling is not None
        pooled = row if request.pooling is Pooling.LAST else self._pools[request.id].read(request.pooling)
        if not bool(pooled.isfinite().all()):
            self._end_choice(sequence, FinishReason.ERROR, "the model's output is not a number")
            return
        embedding = self._executor.dump_logits(pooled)
        self.deltas.append(build_final_delta(sequence, FinishReason.STOP, embedding=embedding))
        self._close(sequence)

    def _accept_token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        if token == NO_TOKEN:
            self._end_choice(sequence, FinishReason.ERROR, _NO_TOKEN_MESSAGE)
            return
        try:
            outcome = decide_outcome(token, len(sequence.output), sequence.sampler_state)
        except RequestError as error:
            logger.warning("a grammar ended a choice of %s: %s", sequence.request.id, error)
            self._end_choice(sequence, FinishReason.ERROR, error.with_traceback(None))
            return
        except WorkerError as error:
            logger.warning("a grammar ended a choice of %s: %s", sequence.request.id, error)
            self._end_choice(sequence, FinishReason.ERROR, f"the answer cannot go on: {error}")
            return
        except Exception as error:
            logger.exception("a grammar failed at token %d", token)
            self._end_choice(sequence, FinishReason.ERROR, f"the grammar failed: {error}")
            return
        scores = self._take_prompt_scores(sequence.request) if not sequence.output else None
        self.deltas.append(build_token_delta(sequence, token, outcome, logprob, scores))
        self._totals.generated_tokens += outcome.keep
        self._scheduler.append_token(sequence, token)
        if outcome.finish_reason is not None:
            self._close(sequence)

    def _take_prompt_scores(self, request: Request) -> tuple[TokenLogprob | None, ...] | None:
        if request.prompt_logprobs is None:
            return None
        return tuple(self._prompt_scores.get(request.id, ()))
