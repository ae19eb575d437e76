"""What happens on the engine thread: requests come, steps run, tokens go. No thread is known here.

Every handler and `finish_step` leave `deltas` for the caller to deliver. A request is in `requests` from submission
until its last choice ends; a peer's prompt is in `peers` until it is released.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable

import torch

from tandem_worker.engine.block_reports import LayerReport, PeerPrefill, plan_reports
from tandem_worker.engine.contract import LayerListener, PrefillClient, RemotePrefill, RemotePrefillResult
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.execute.batch import LogitsLayout
from tandem_worker.engine.execute.executor import ModelExecutor, is_fatal
from tandem_worker.engine.execute.step import PendingStep, StepAbandonedError
from tandem_worker.engine.guess.speculator import Speculator
from tandem_worker.engine.outputs import build_final_delta, build_token_delta, decide_outcome, join_deltas
from tandem_worker.engine.sample.contract import NO_TOKEN
from tandem_worker.engine.sample.host_sampler import score_prompt
from tandem_worker.engine.sample.pooling import Pool
from tandem_worker.engine.sample.state import SamplingState
from tandem_worker.engine.schedule.host_blocks import is_moving_cheaper
from tandem_worker.engine.schedule.meter import SpeedMeter, WorkMeter
from tandem_worker.engine.schedule.params import FinishReason, TokenDelta, TokenLogprob
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.prefix_cache import name_prompt
from tandem_worker.engine.schedule.request import Request, Sequence, SequenceState
from tandem_worker.engine.schedule.scheduler import Scheduler
from tandem_worker.host.errors import WorkerError
from tandem_worker.model.pooling import Pooling

logger = logging.getLogger(__name__)

_NO_TOKEN_MESSAGE = "the model's output allows no token: it is not a number, or every token is excluded"
_ALONE = 3.0
"""A prompt with the engine to itself may take this much longer steps: larger chunks read less of their context anew."""


class Totals:
    """Counters since the start."""

    __slots__ = ("cached_tokens", "generated_tokens", "prefills_fallback", "prefills_local", "prefills_remote",
                 "prompt_tokens", "steps")  # fmt: skip

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.steps = 0
        self.prefills_local = self.prefills_remote = self.prefills_fallback = 0


class StepRunner:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: ModelExecutor,
        *,
        eos_token_ids: frozenset[int],
        target_step_seconds: float | None,
        is_abandoned: Callable[[StepPlan], bool] = lambda plan: False,
        runs_ahead: bool = False,
        hand_over: Callable[[], None] = lambda: None,
        speculator: Speculator | None = None,
    ) -> None:
        """`runs_ahead`: steps are launched before the tokens of the one before are known, where that is possible.
        `speculator` puts guesses into steps; None: every step is one token of each choice.

        `hand_over` delivers `deltas`. Called where they would wait until another step is computed.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.prefill_client: PrefillClient | None = None
        self.requests: dict[str, Request] = {}
        self.peers: dict[str, PeerPrefill] = {}
        self.deltas: list[TokenDelta] = []
        self.meter = SpeedMeter()
        self.work = WorkMeter()
        """Measures what `step` has done."""
        self.totals = Totals()
        self.latest = StepPlan()
        """What was planned last."""
        self._eos_token_ids = eos_token_ids
        self._target_step_seconds = target_step_seconds
        self._is_abandoned = is_abandoned
        self._runs_ahead = runs_ahead
        self._hand_over = hand_over
        self._under_way: PendingStep | None = None
        """Launched, and finished after the next one is launched."""
        self._last_finish = 0.0
        scheduler.prefers_move = self._prefers_move
        scheduler.has_begun = self._has_begun
        scheduler.prefill_rate = lambda: self.meter.prefill_tokens_per_second
        scheduler.tokens_within = self.meter.plan_chunk_tokens
        self.speculator = speculator
        if speculator is not None:
            scheduler.guess = speculator.plan
        self._right: Counter[Sequence] = Counter()
        """How many guesses of the step that is being finished saved one, by choice."""
        self._generations = itertools.count(1)
        self._prompt_scores: dict[str, list[TokenLogprob | None]] = {}
        self._pools: dict[str, Pool] = {}

    @property
    def lanes(self) -> tuple[StepRunner, ...]:
        """This one alone; see `LaneRunner`."""
        return (self,)

    def knows(self, request_id: str) -> bool:
        """Whether some choice of the request is still open."""
        return request_id in self.requests

    @property
    def has_deltas(self) -> bool:
        """Whether there is something to deliver."""
        return bool(self.deltas)

    def take_deltas(self) -> list[TokenDelta]:
        """What is to be delivered now."""
        deltas, self.deltas = self.deltas, []
        return deltas

    # -- commands ------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A client's request. Without a prefill client its endpoints are forgotten: it is prefilled here."""
        if self.prefill_client is None:
            request.endpoints = ()
        self.requests[request.id] = request
        self.scheduler.add(request)
        grammars = request.grammars or (None,) * request.n
        for choice, grammar in zip(request.choices, grammars, strict=True):
            choice.sampler_state = SamplingState(request.sampling, self._eos_token_ids, grammar)
            choice.lockstep = choice.sampler_state.needs_host

    def submit_peer(self, request: Request, order: RemotePrefill, listener: LayerListener) -> None:
        """A prompt that another worker ordered; `listener` is told what may be sent."""
        block_size = self.scheduler.blocks.block_size
        self.peers[request.id] = PeerPrefill(order, listener, request, order.num_cached_tokens // block_size)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End every choice of a request with ABORT. What has ended is ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end_request(request, FinishReason.ABORT)

    def abort_choice(self, request_id: str, choice: int) -> None:
        """Before its first token a choice stays: the others wait for the prompt that choice 0 computes."""
        request = self.requests.get(request_id)
        if request is not None and request.choices[choice].output:
            self._end_choice(request.choices[choice], FinishReason.ABORT)

    def release(self, request_id: str) -> None:
        """Nobody needs the blocks of this peer's prompt any more; they stay cached."""
        peer = self.peers.pop(request_id, None)
        if peer is not None:
            if peer.sequence.state is SequenceState.LOADING and self.scheduler.loads is not None:
                self.scheduler.loads.cancel(peer.sequence)
            self.scheduler.finish(peer.sequence)
            peer.request.choices = []

    def remote_overdue(self, request_id: str, generation: int) -> None:
        """The prefill worker takes long to begin. Ignored when the attempt is an older one."""
        sequence = self._find_receiving(request_id, generation)
        if sequence is not None:
            sequence.overdue = True

    def remote_done(self, result: RemotePrefillResult) -> None:
        """All blocks are filled: the first token is chosen from the result's logits. An older attempt's is ignored.

        Logits of the wrong size are a failed attempt: the prompt is prefilled here.
        """
        sequence = self._find_receiving(result.request_id, result.generation)
        if sequence is None:
            return
        logits = self.executor.load_logits(result.logits)
        if logits is None:
            self._fall_back(sequence, f"its logits have {len(result.logits)} bytes")
            return
        request = sequence.request
        request.num_cached_tokens = result.num_cached_tokens
        request.prefill_worker = result.worker
        self.totals.prefills_remote += 1
        self.scheduler.receive_done(sequence)
        self._accept_logits([sequence], logits)

    def remote_failed(self, request_id: str, generation: int, reason: str) -> None:
        """Prefill here instead. Ignored when the attempt is an older one."""
        sequence = self._find_receiving(request_id, generation)
        if sequence is not None:
            self._fall_back(sequence, reason)

    def end_all(self) -> None:
        """The worker stops: everything inside ends here."""
        if self._under_way is not None:
            self.finish_step(self._under_way)
            self._under_way = None
        for request in list(self.requests.values()):
            self._end_request(request, FinishReason.ABORT)
        self._fail_peers("the worker stops")

    def disown_all(self, message: str) -> None:
        """The step loop is dead and its state cannot be trusted: only say so to everyone who waits."""
        for request in self.requests.values():
            for choice in request.choices:
                if choice.state is not SequenceState.FINISHED:
                    self.deltas.append(build_final_delta(choice, FinishReason.ERROR, message))
        self.requests.clear()
        self._fail_peers(message)

    def _fail_peers(self, message: str) -> None:
        for peer in self.peers.values():
            if peer.sequence.state is not SequenceState.HELD:
                peer.listener.prefill_failed(peer.request.id, message)

    def _find_receiving(self, request_id: str, generation: int) -> Sequence | None:
        """The sequence that waits for this attempt; None when the message is late."""
        request = self.requests.get(request_id)
        if request is None or request.generation != generation:
            return None
        sequence = request.choices[0]
        return sequence if sequence.state is SequenceState.RECEIVING else None

    def _fall_back(self, sequence: Sequence, reason: str) -> None:
        logger.warning("remote prefill of %s failed, prefilling here: %s", sequence.request.id, reason)
        self.totals.prefills_fallback += 1
        self.scheduler.receive_failed(sequence)

    def _end_request(self, request: Request, reason: FinishReason, error: str | RequestError | None = None) -> None:
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
        if sequence.state is SequenceState.RECEIVING and self.prefill_client is not None:
            self.prefill_client.cancel(request.id, request.generation)  # no late write may hit a freed block
        if sequence.state is SequenceState.LOADING and self.scheduler.loads is not None:
            self.scheduler.loads.cancel(sequence)
        self.scheduler.finish(sequence)
        sequence.sampler_state = None
        if self.speculator is not None:
            self.speculator.forget(sequence)
        if request.num_open == 0:
            if request.trace is not None:
                request.trace.note_end(sum(len(choice.output) - choice.num_resumed for choice in request.choices))
            self._prompt_scores.pop(request.id, None)
            self._pools.pop(request.id, None)
            self.requests.pop(request.id, None)
            request.choices = []

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch a step, and finish the one before it or itself. False: nothing can be done until a command comes."""
        step = self.begin_step()
        if step is not None:
            self.launch_step(step)
        before, self._under_way = self._under_way, None
        if before is not None:
            self._end_step(before)
        if step is not None and step.chosen is None:
            if self.deltas:
                self._hand_over()
            self._end_step(step)
        else:
            self._under_way = step
        return step is not None or before is not None

    def _end_step(self, step: PendingStep) -> None:
        self.finish_step(step)
        self.work.record(
            began=step.began,
            ended=time.perf_counter(),
            num_prefill_tokens=0 if step.error is not None else step.plan.num_prefill_tokens,
            num_decodes=step.plan.num_decode_tokens,
        )

    def begin_step(self) -> PendingStep | None:
        """Plan a step and order remote prefills. None: nothing can be computed until a command comes.

        Between `begin_step` and `finish_step` something launches the plan: `launch_step`, or one call for the steps
        of several runners, which sets `output` or `error` of each.
        """
        began = time.perf_counter()
        plan = self._plan()
        while plan.empty:
            # A failed start is prefilled here, and a preemption has made room: both want another look.
            retry = plan.num_preempted > 0 or any(s.state is SequenceState.RUNNING for s in plan.orders)
            if not retry or self._under_way is not None:
                return None
            plan = self._plan()
        self.latest = plan
        reports = self._report_cached_and_plan(plan)
        return PendingStep(plan, self._watch_layers(plan, reports), began)

    def launch_step(self, step: PendingStep) -> None:
        """Run the forward pass, and choose the tokens if the host has no part in that.

        Raises only what nothing can be computed after.
        """
        try:
            step.output = self.executor.run(step.plan, step.on_layer)
            if self._runs_ahead and not step.plan.lockstep:
                step.chosen = self.executor.choose(step.output)
        except Exception as error:
            if is_fatal(error):
                raise
            step.error = error

    def finish_step(self, step: PendingStep) -> None:
        """Deliver a launched step's tokens, or end the requests that it could not compute."""
        plan, output = step.plan, step.output
        if step.chosen is None:
            # Its tokens, if it has any, would wait too. An abandoned step or a part of a prompt has none, and its
            # blocks may be let go of next: the device must not write to them when they are another's.
            self.executor.settle()
        if step.error is not None:
            self.scheduler.cancel(plan)
            if not isinstance(step.error, StepAbandonedError):
                logger.error("a step failed", exc_info=step.error)
                self._fail(plan, step.error)
            return
        assert output is not None, "the step was not launched"
        if step.chosen is None:
            self.scheduler.complete(plan)
            self._accept_step(output.layout, output.logits)
        else:
            tokens = step.chosen.wait().tolist()
            self.scheduler.complete(plan)
            self._accept_chosen(output.layout.sequences, tokens)
        self.totals.steps += 1
        now = time.perf_counter()
        seconds = now - max(step.began, self._last_finish)
        self.meter.record(
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decodes=len(plan.decodes),
            num_guesses=plan.num_guesses,
            num_saved=self._right.total(),
            seconds=seconds,
        )
        if self.speculator is not None:
            self.speculator.record(plan, self._right, seconds)
            self._right.clear()
        self._last_finish = now

    def _plan(self) -> StepPlan:
        target = self._target_step_seconds
        if target is not None and self.scheduler.num_waiting + len(self.scheduler.running) <= 1:
            target *= _ALONE
        plan = self.scheduler.schedule(self.meter.plan_step_tokens(target))
        for sequence in plan.withdrawn:
            self._withdraw_order(sequence)
        if self.deltas and (plan.moves_out or plan.moves_in):
            self._hand_over()
        self.executor.move_blocks(plan)
        for sequence in plan.orders:
            self._start_remote(sequence)
        return plan

    def _has_begun(self, sequence: Sequence) -> bool:
        assert self.prefill_client is not None, "it was given the order"
        return self.prefill_client.has_begun(sequence.request.id, sequence.request.generation)

    def _withdraw_order(self, sequence: Sequence) -> None:
        """Its blocks are others' now, or are filled here: before any step writes to them no late write may come."""
        assert self.prefill_client is not None, "it gave the order"
        self.prefill_client.cancel(sequence.request.id, sequence.request.generation)
        if sequence.state is SequenceState.RUNNING:
            logger.warning("remote prefill of %s has not begun and others lack its blocks, prefilling here",
                           sequence.request.id)  # fmt: skip
            self.totals.prefills_fallback += 1

    def _prefers_move(self, num_tokens: int, num_blocks: int) -> bool:
        return is_moving_cheaper(
            num_tokens,
            num_blocks,
            seconds_per_block=self.executor.seconds_per_moved_block,
            prefill_tokens_per_second=self.meter.prefill_tokens_per_second,
        )

    def _start_remote(self, sequence: Sequence) -> None:
        request = sequence.request
        request.generation = next(self._generations)
        tokens = (*request.prompt, *sequence.output)
        order = RemotePrefill(
            request_id=request.id,
            generation=request.generation,
            token_ids=tokens,
            num_cached_tokens=sequence.num_computed,
            block_ids=tuple(sequence.block_ids),
            endpoints=request.endpoints,
            cache_salt=request.cache_salt,
            priority=request.priority,
            prompt_name=self._name_tokens(sequence, tokens),
            trace=request.trace,
        )
        assert self.prefill_client is not None
        try:
            self.prefill_client.start(order)
        except Exception as error:
            logger.exception("remote prefill could not be started")
            self._fall_back(sequence, str(error))

    def _name_prompt(self, request: Request) -> bytes:
        block_size = self.scheduler.blocks.block_size
        return name_prompt(request.chain_root, request.prompt_chain, request.prompt, block_size)

    def _name_tokens(self, sequence: Sequence, tokens: tuple[int, ...]) -> bytes:
        """As `_name_prompt`, for a prompt with what a resumed choice has said."""
        block_size = self.scheduler.blocks.block_size
        chain = sequence.name_blocks(len(tokens) // block_size, block_size)
        return name_prompt(sequence.request.chain_root, chain, tokens, block_size)

    def _report_cached_and_plan(self, plan: StepPlan) -> list[LayerReport]:
        block_size = self.scheduler.blocks.block_size
        for chunk in plan.chunks:
            if chunk.sequence.request.serves_peer:
                self.peers[chunk.sequence.request.id].report_start(self.executor.num_layers, block_size)
        return plan_reports(plan, self.peers, block_size)

    def _watch_layers(self, plan: StepPlan, reports: list[LayerReport]) -> Callable[[int], None] | None:
        if not plan.chunks:
            return None  # a decode step is short and reports nothing

        def on_layer(layer: int) -> None:
            if self._is_abandoned(plan):
                raise StepAbandonedError
            for report in reports:
                report.send(layer)

        return on_layer

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        message = f"the engine could not compute this request: {type(error).__name__}: {error}"
        for request in {id(s.request): s.request for s in plan.sequences()}.values():
            peer = self.peers.get(request.id) if request.serves_peer else None
            if peer is None:
                self._end_request(request, FinishReason.ERROR, message)
            else:
                self.scheduler.hold_for_peer(peer.sequence)
                peer.listener.prefill_failed(request.id, message)

    # -- logits to tokens ----------------------------------------------------------------------------------------

    def _accept_step(self, layout: LogitsLayout, logits: torch.Tensor) -> None:
        for chunk, first in layout.scored:
            rows = logits[first : first + chunk.length]
            if chunk.sequence.request.pooling is not None:
                self._pools.setdefault(chunk.sequence.request.id, Pool()).add(chunk.start, rows)
            else:
                self._score_chunk(chunk.sequence, chunk.start, rows)
        first = len(self.deltas)
        if layout.sequences:
            self._accept_logits(layout.sequences, logits if layout.rows is None else logits[layout.rows])
        if layout.waves:
            self._check_guesses(layout, logits)
            self.deltas[first:] = join_deltas(self.deltas[first:])

    def _check_guesses(self, layout: LogitsLayout, logits: torch.Tensor) -> None:
        """Go on with the choices whose next token was guessed, wave by wave: for each it is as one step more.

        So whatever the choice of a token depends on (penalties, a grammar, the end) is as it would be without guesses.
        """
        right = set(layout.sequences)
        """Choices whose guesses have all been right so far."""
        for wave in layout.waves:
            rows: dict[Sequence, int] = {}
            for sequence, (guess, row) in wave.items():
                if sequence in right and sequence.state is SequenceState.RUNNING and sequence.output[-1] == guess:
                    self.scheduler.confirm(sequence)
                    rows[sequence] = row
            if not rows:
                return
            right = set(rows)
            self._right.update(right)
            self._accept_logits(list(rows), logits[list(rows.values())])

    def _score_chunk(self, sequence: Sequence, start: int, logits: torch.Tensor) -> None:
        request = sequence.request
        scores = self._prompt_scores.setdefault(request.id, [None])
        del scores[start + 1 :]  # after a preemption the prompt is computed again
        targets = list(request.prompt[start + 1 : start + 1 + logits.shape[0]])
        scores.extend(score_prompt(logits[: len(targets)], targets, request.prompt_logprobs or 0))

    def _accept_logits(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Choose and deliver the next token of each sequence; row i of `logits` is sequence i's."""
        sequences, logits = self._expand(sequences, logits)
        if not sequences:
            return
        sampler = self.executor.sampler
        tokens: list[int] = sampler.choose_tokens(logits, sequences).tolist()
        logprobs = sampler.compute_logprobs(logits, sequences, tokens)
        for row, sequence in enumerate(sequences):
            self._accept_token(sequence, tokens[row], logprobs.get(row))

    def _accept_chosen(self, sequences: list[Sequence], tokens: list[int]) -> None:
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
            peer = self.peers[request.id]
            self.scheduler.hold_for_peer(sequence)
            peer.listener.prefill_done(
                request.id, self.executor.dump_logits(row), request.num_cached_tokens, self._name_prompt(request)
            )
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
        self.scheduler.fork(request)
        return list(request.choices)

    def _count_prompt(self, request: Request) -> None:
        self.totals.prompt_tokens += len(request.prompt)
        self.totals.cached_tokens += request.num_cached_tokens
        if request.trace is not None:
            request.trace.note_prompt(len(request.prompt), request.num_cached_tokens)
        if not request.generation and not request.serves_peer:
            self.totals.prefills_local += 1

    def _deliver_embedding(self, sequence: Sequence, row: torch.Tensor) -> None:
        request = sequence.request
        assert request.pooling is not None
        pooled = row if request.pooling is Pooling.LAST else self._pools[request.id].read(request.pooling)
        if not bool(pooled.isfinite().all()):
            self._end_choice(sequence, FinishReason.ERROR, "the model's output is not a number")
            return
        embedding = self.executor.dump_logits(pooled)
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
        self.totals.generated_tokens += outcome.keep
        self.scheduler.append_token(sequence, token)
        if outcome.finish_reason is not None:
            self._close(sequence)

    def _take_prompt_scores(self, request: Request) -> tuple[TokenLogprob | None, ...] | None:
        if request.prompt_logprobs is None:
            return None
        return tuple(self._prompt_scores.get(request.id, ()))
