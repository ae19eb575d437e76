"""The engine: a thread that steps while there is work and sleeps when there is none.

Other threads hand it commands through a queue and never touch its state; what they may read (`stats`) is replaced as a
whole. Checks that only need the request run on the calling thread, so a bad request costs the engine nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tandem_api.launch import TTFTDeadline

from tandem_worker.engine.admission import OpenRequests, check_prompt, check_request, replay_grammars
from tandem_worker.engine.contract import (
    DeliverFunction,
    EngineStats,
    LayerListener,
    PrefillClient,
    RemotePrefill,
    RemotePrefillResult,
)
from tandem_worker.engine.errors import EngineStoppedError, RequestError
from tandem_worker.engine.execute.executor import ModelExecutor
from tandem_worker.engine.guess.speculator import Speculator
from tandem_worker.engine.runner import Runner, StepRunner
from tandem_worker.engine.schedule.params import GenerationRequest, SamplingParams
from tandem_worker.engine.schedule.prefix_cache import build_chain_root, extend_chain
from tandem_worker.engine.schedule.request import Request
from tandem_worker.engine.schedule.scheduler import Scheduler
from tandem_worker.engine.step_thread import EngineTurns, StepThread
from tandem_worker.engine.trace import RequestTrace
from tandem_worker.host.vitals import Vitals
from tandem_worker.model.contract import KVCache

if TYPE_CHECKING:
    from tandem_worker.engine.drafting import Drafting
    from tandem_worker.engine.execute.host_pool import HostPool
    from tandem_worker.engine.lending import LendingDesk
    from tandem_worker.engine.loading import TierDesk
    from tandem_worker.engine.tiers import Tier


class EngineCore:
    """Implements `engine.contract.Engine`. Any thread; the thread of its own starts with the first request."""

    def __init__(
        self,
        *,
        schedulers: Sequence[Scheduler],
        executor: ModelExecutor,
        deliver: DeliverFunction,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        model_digest: str,
        max_queued_requests: int,
        target_step_seconds: float | None,
        runs_ahead: bool = False,
        speculators: Sequence[Speculator] = (),
        draftings: Sequence[Drafting] = (),
        vitals: Vitals | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """One scheduler, or one for each lane of a group's executor. `speculators`, `draftings`: one of each lane, or
        none. `clock` is the schedulers'."""
        self.max_model_len = max_model_len
        self._scheduler = schedulers[0]
        self._executor = executor
        self._model_digest = model_digest
        self._max_queued_requests = max_queued_requests
        self._clock = clock
        self._open = OpenRequests()
        count = len(schedulers)
        lanes = [
            StepRunner(
                scheduler,
                executor,
                eos_token_ids=eos_token_ids,
                target_step_seconds=target_step_seconds,
                is_abandoned=self._open.is_abandoned if executor.can_abandon else lambda plan: False,
                runs_ahead=runs_ahead,
                hand_over=self._hand_over,
                speculator=speculator,
                drafting=drafting,
                lane=lane,
            )
            for lane, (scheduler, speculator, drafting) in enumerate(
                zip(schedulers, speculators or [None] * count, draftings or [None] * count, strict=True)
            )
        ]
        self._runner = _join_lanes(lanes, executor)
        self._turns = EngineTurns(
            self._runner, executor, self._open, deliver, num_pending=lambda: self.steps.num_commands
        )
        self.steps = StepThread(self._turns, vitals or Vitals())
        """The engine's thread."""
        self._send = self.steps.send
        self._draining = False

    # -- any thread ----------------------------------------------------------------------------------------------

    @property
    def graph_bytes(self) -> int:
        """Device memory that recordings of decode steps take; 0 without them."""
        return self._executor.graph_bytes

    @property
    def graphs_pending(self) -> int:
        """Batch sizes of decode steps that are still to be recorded: until then they run unrecorded."""
        return self._executor.graphs_pending

    @property
    def kv_cache(self) -> KVCache:
        """The executor's; it stays the same for the life of the engine."""
        return self._executor.kv_cache

    @property
    def host_pool(self) -> HostPool | None:
        """The bytes of blocks in host memory, on this rank; None: there is none below the device's."""
        return self._executor.host_pool

    @property
    def prefill_client(self) -> PrefillClient | None:
        """Orders prompts from prefill workers; None: every prompt is prefilled here."""
        return self._runner.lanes[0].remote.client

    @prefill_client.setter
    def prefill_client(self, client: PrefillClient | None) -> None:
        """To be set before the first request: the transfer layer is built around this engine's `kv_cache`."""
        for lane in self._runner.lanes:
            lane.remote.client = client

    def open_desk(self, tier: Tier, *, cold_blocks: int, fence: Callable[[], object], below: bool = False) -> TierDesk:
        """Join with a tier, before the first request: what it tells the engine goes by way of the desk. A group's lanes
        have none. `below`: it is offered what host memory has."""
        from tandem_worker.engine.loading import TierDesk

        (lane,) = self._runner.lanes
        return TierDesk(lane.scheduler, tier, cold_blocks=cold_blocks, fence=fence, send=self._send, below=below)

    def open_lending(self, fence: Callable[[], object]) -> LendingDesk:
        """A desk that lends blocks to who copies them for other workers. A group's lanes have none."""
        from tandem_worker.engine.lending import LendingDesk

        (lane,) = self._runner.lanes
        pool = self.host_pool
        return LendingDesk(lane.scheduler, fence, self._send, None if pool is None else pool.fence)

    def deliver_to(self, deliver: DeliverFunction) -> None:
        """From now on tokens go to `deliver`. To be called while no request is open."""
        self._turns.deliver = deliver

    @property
    def thread(self) -> threading.Thread | None:
        """The engine's; None before the first command."""
        return self.steps.thread

    @property
    def turn_began(self) -> float:
        """When the present turn of the step loop began, by the monotonic clock; 0 while there is nothing to do."""
        return self.steps.turn_began

    def submit(self, request: GenerationRequest) -> None:
        self._check_admitting()
        check_request(request, vocab_size=self._executor.model.vocab_size, max_model_len=self.max_model_len)
        inside = self._build_request(
            id=request.request_id,
            prompt=request.prompt_token_ids,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        inside.n = request.n
        inside.endpoints = request.prefill_endpoints
        inside.kv_source, inside.kv_source_tokens = request.kv_source, request.kv_source_tokens
        inside.prompt_logprobs = request.prompt_logprobs
        inside.pooling = request.pooling
        inside.step_seconds = request.step_seconds
        inside.prediction = request.prediction
        inside.literals = request.literals
        _follow(inside, request.trace)
        if request.resumed is not None:
            inside.resumed = request.resumed
            inside.grammars = replay_grammars(request)
        self._claim(self._open.clients, request.request_id)
        self._send(partial(self._turns.submit, inside))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        if request_id not in self._open.clients:
            return
        if choice is None:
            self._open.aborting.add(request_id)
            self._send(partial(self._turns.abort, request_id))
        else:
            self._tell(lambda lane: lane.outputs.abort_choice(request_id, choice))

    def submit_prefill(self, order: RemotePrefill, listener: LayerListener) -> None:
        self._check_admitting()
        check_prompt(order.token_ids, vocab_size=self._executor.model.vocab_size, max_model_len=self.max_model_len)
        inside = self._build_request(
            id=order.request_id,
            prompt=order.token_ids,
            sampling=SamplingParams(max_tokens=1),
            cache_salt=order.cache_salt,
            priority=order.priority,
        )
        inside.serves_peer = True
        inside.kv_source, inside.kv_source_tokens = order.kv_source, order.kv_source_tokens
        _follow(inside, order.trace)
        self._claim(self._open.peers, order.request_id)
        self._send(lambda: self._runner.choose(inside).peers.submit(inside, order, listener))

    def release(self, request_id: str) -> None:
        if request_id in self._open.peers:
            self._open.releasing.add(request_id)
            self._send(partial(self._turns.release, request_id))

    def remote_prefill_overdue(self, request_id: str, generation: int) -> None:
        self._tell(lambda lane: lane.remote.overdue(request_id, generation))

    def remote_prefill_done(self, result: RemotePrefillResult) -> None:
        self._tell(lambda lane: lane.remote_done(result))

    def remote_prefill_failed(self, request_id: str, generation: int, reason: str) -> None:
        self._tell(lambda lane: lane.remote.failed(request_id, generation, reason))

    def stats(self) -> EngineStats:
        return self._turns.stats

    def begin_measuring(self) -> None:
        """What has been computed so far was not work: seconds, computed tokens and velocity count from here."""
        self._send(self._runner.work.reset)

    def hold_recordings(self, held: bool) -> None:
        """Whether decode steps that are still to be recorded wait."""
        self._send(partial(setattr, self._turns, "holds_recordings", held))

    def describe_turn(self) -> str:
        """What the engine's thread was given to compute last, for whoever asks why it does not end."""
        lanes = self._runner.lanes
        plans = [lane.latest for lane in lanes]
        batches = [f"{len(plan.decodes)} decodes and {plan.num_prefill_tokens} prompt tokens" for plan in plans]
        steps = max(lane.totals.steps for lane in lanes)
        return f"rank 0 of {self._executor.num_ranks}, step {steps + 1} since the start, {'; '.join(batches)}"

    def order_by(self, target: TTFTDeadline | None) -> None:
        """Compute prompts that come from now on in the order in which their first tokens are due, or, with None, as
        they come."""
        for lane in self._runner.lanes:
            lane.scheduler.hooks.ttft_target = target

    def drain(self) -> None:
        self._draining = True

    @property
    def idle(self) -> bool:
        return self._open.empty

    @property
    def failure(self) -> BaseException | None:
        return self.steps.failure

    def fail(self, error: BaseException) -> None:
        """Admit nothing any more, because of `error`: the step loop may wait forever for something that is gone."""
        self.steps.fail(error)

    def stop(self, timeout: float | None = 10.0) -> None:
        """End every request with ABORT and the thread with them."""
        self._draining = True
        self.steps.stop(timeout)

    # -- calling thread, helpers ---------------------------------------------------------------------------------

    def _check_admitting(self) -> None:
        if self.failure is not None:
            raise EngineStoppedError(f"the engine has failed: {self.failure}")
        if self._draining:
            raise EngineStoppedError("the engine is draining and takes no new requests")
        self.steps.start()  # before the request is in anybody's books

    def _build_request(
        self, *, id: str, prompt: tuple[int, ...], sampling: SamplingParams, cache_salt: str, priority: float
    ) -> Request:
        root = build_chain_root(self._model_digest, salt=cache_salt)
        return Request(
            id=id,
            prompt=prompt,
            sampling=sampling,
            arrival=self._clock(),
            chain_root=root,
            prompt_chain=extend_chain(root, prompt, self._scheduler.blocks.block_size),
            cache_salt=cache_salt,
            priority=priority,
        )

    def _claim(self, open_ids: set[str], request_id: str) -> None:
        self.steps.claim(partial(self._admit, open_ids, request_id))

    def _admit(self, open_ids: set[str], request_id: str) -> None:
        if request_id in open_ids:
            raise RequestError(f"request id {request_id!r} is in use", status=409)
        num_queued = sum(lane.scheduler.queues.num_queued for lane in self._runner.lanes)
        if num_queued + self.steps.num_commands >= self._max_queued_requests:
            raise RequestError(
                f"the engine's queue is full ({self._max_queued_requests} requests wait)",
                code="queue_full",
                status=429,
            )
        open_ids.add(request_id)

    def _hand_over(self) -> None:
        self._turns.flush()

    def _tell(self, command: Callable[[StepRunner], object]) -> None:
        """Have every lane told; those that do not know the request that it is about ignore it."""
        self._send(partial(self._turns.tell, command))


def _join_lanes(lanes: list[StepRunner], executor: ModelExecutor) -> Runner:
    if len(lanes) == 1:
        return lanes[0]
    from tandem_worker.engine.lanes import LaneRunner  # a group's

    return LaneRunner(lanes, executor)


def _follow(request: Request, trace: RequestTrace | None) -> None:
    if trace is not None:
        request.trace, trace.arrived = trace, request.arrival
