"""The engine's thread: commands in the order in which they came, and steps while there is work."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from tandem_worker.engine.admission import OpenRequests
from tandem_worker.engine.contract import DeliverFunction, EngineStats
from tandem_worker.engine.errors import EngineStoppedError
from tandem_worker.engine.execute.executor import ModelExecutor
from tandem_worker.engine.runner import Runner, StepRunner
from tandem_worker.engine.schedule.request import Request
from tandem_worker.engine.snapshot import build_stats
from tandem_worker.host.errors import ThreadStartError
from tandem_worker.host.vitals import Vitals

logger = logging.getLogger(__name__)

_BETWEEN_RECORDINGS, _RECORDING_SHARE = 1.0, 20
"""Beside streams the next decode step is recorded after so many seconds, and so many times what the last one took."""


class EngineTurns:
    """What the engine's thread does: steps in its turns, and what commands want of the lanes."""

    def __init__(
        self,
        runner: Runner,
        executor: ModelExecutor,
        open_requests: OpenRequests,
        deliver: DeliverFunction,
        *,
        num_pending: Callable[[], int],
    ) -> None:
        """`num_pending` tells how many commands wait."""
        self.runner = runner
        self.deliver = deliver
        self._executor = executor
        self._open = open_requests
        self._num_pending = num_pending
        self.holds_recordings = False
        """Nothing is recorded for now: whoever waits for the first tokens would wait for recordings too."""
        self.next_recording = 0.0
        """When the next decode step may be recorded beside streams, by the monotonic clock."""
        self.stats: EngineStats = build_stats(runner.lanes, runner.work, num_pending=0)
        """Replaced as a whole, for any thread."""
        self._hands_over_within = executor.model.is_one_call and executor.num_ranks == 1
        """Tokens wait for the next step to be prepared: whoever writes them to clients does so while it is computed,
        and the engine's thread does not wait for the interpreter's lock."""
        if self._hands_over_within:
            executor.on_compute = self._hand_over

    def take_turn(self, busy: bool) -> bool:
        """Compute. `busy`: the turn before did. False: nothing can be done until a command comes."""
        if not self._waits:
            self._hand_over()  # the first token of a prompt that another worker computed waits for no step
        busy = self.runner.step()
        if not (busy and self._waits and self._has_deltas):
            self.flush()  # where only prompts are computed no token comes, and figures change all the same
        if self._executor.graphs_pending and not self.holds_recordings:
            busy = self._record_graph(busy) or busy
        return busy

    def end_all(self) -> None:
        """The thread ends: so does everything inside."""
        for lane in self.runner.lanes:
            lane.end_all()

    def disown_all(self, message: str) -> None:
        """The thread dies, and what it knew cannot be trusted: tell everyone who waits."""
        for lane in self.runner.lanes:
            lane.disown_all(message)

    def flush(self) -> None:
        """Publish the figures, then deliver, then forget what has ended: `idle` means delivered."""
        lanes = self.runner.lanes
        self.stats = build_stats(lanes, self.runner.work, num_pending=self._num_pending())
        deltas = lanes[0].outputs.take()
        for lane in lanes[1:]:
            deltas += lane.outputs.take()
        if not deltas:
            return
        try:
            self.deliver(deltas)
        except Exception:
            logger.exception("deltas could not be delivered")
        for delta in deltas:
            if delta.finish_reason is not None and not any(delta.request_id in lane.requests for lane in lanes):
                self._open.clients.discard(delta.request_id)

    def submit(self, request: Request) -> None:
        """A client's request, which stays in one lane."""
        self.runner.choose(request).submit(request)

    def abort(self, request_id: str) -> None:
        """End a client's request."""
        for lane in self.runner.lanes:
            lane.outputs.abort(request_id)
        self._open.aborting.discard(request_id)

    def release(self, request_id: str) -> None:
        """Let go of the prompt of another worker."""
        for lane in self.runner.lanes:
            lane.peers.release(request_id)
        self._open.releasing.discard(request_id)
        self._open.peers.discard(request_id)

    def tell(self, command: Callable[[StepRunner], object]) -> None:
        """Tell every lane; those that do not know the request that it is about ignore it."""
        for lane in self.runner.lanes:
            command(lane)

    @property
    def _waits(self) -> bool:
        """What is to be delivered waits for the next step's launch."""
        return self._hands_over_within or any(lane.holds_back for lane in self.runner.lanes)

    @property
    def _has_deltas(self) -> bool:
        return any(lane.outputs.deltas for lane in self.runner.lanes)

    def _hand_over(self) -> None:
        if self._has_deltas:
            self.flush()

    def _record_graph(self, busy: bool) -> bool:
        """Record one batch size that the start left for later, if it is time; whether it did.

        At once where there is nothing else to do. Beside streams, so that they wait for it one part in twenty at most.
        """
        began = time.monotonic()
        if busy and began < self.next_recording:
            return False
        self._executor.record_next_graph()
        ended = time.monotonic()
        self.next_recording = ended + max(_BETWEEN_RECORDINGS, _RECORDING_SHARE * (ended - began))
        return True


class StepThread:
    """Runs commands in their order, and turns while there is work. Starts with the first command, or with `start`."""

    def __init__(self, turns: EngineTurns, vitals: Vitals) -> None:
        self.vitals = vitals
        self.failure: BaseException | None = None
        """What killed it, or made it useless."""
        self.thread: threading.Thread | None = None
        self.turn_began = 0.0
        """When the present turn began, by the monotonic clock; 0 while there is nothing to do."""
        self._turns = turns
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._ended = False
        """No command is executed any more."""

    # -- any thread ----------------------------------------------------------------------------------------------

    @property
    def num_commands(self) -> int:
        """Commands that wait for the thread."""
        return len(self._commands)

    def start(self) -> None:
        """Raises EngineStoppedError when the system has no thread for it; nothing is changed then."""
        if self.thread is not None:
            return
        with self._wake:
            if self.thread is None:
                try:
                    self.thread = self.vitals.start_thread("engine", self._run, is_over=self._may_end)
                except ThreadStartError as error:
                    raise EngineStoppedError(f"the engine cannot start: {error}") from error

    def send(self, command: Callable[[], None]) -> None:
        """Have the thread execute this; dropped where it has ended."""
        self.start()
        with self._wake:
            if not self._ended:
                self._commands.append(command)
                self._wake.notify()

    def claim(self, action: Callable[[], None]) -> None:
        """Do this here, one thread after another. Raises EngineStoppedError where the thread has ended, and what
        `action` raises."""
        with self._wake:
            if self._ended:
                raise EngineStoppedError("the engine has ended")
            action()

    def fail(self, error: BaseException) -> None:
        """It is of no use any more, because of `error`: it may wait forever for something that is gone."""
        self.failure = self.failure or error
        self.vitals.set("engine", f"it has failed: {type(error).__name__}: {error}")

    def stop(self, timeout: float | None) -> None:
        """End it, and wait so long for that."""
        with self._wake:
            self._stopping = True
            thread = self.thread
            self._wake.notify()
        if thread is not None:
            thread.join(timeout)

    def _may_end(self) -> bool:
        return self._stopping or self.failure is not None

    # -- the thread itself ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._loop()
                self._end()
                self._turns.end_all()
        except BaseException as error:
            logger.critical("the step loop died", exc_info=error)
            self.fail(error)
            self._end()
            self._turns.disown_all(f"the engine has failed: {error}")
        self._turns.flush()
        self.turn_began = 0.0

    def _end(self) -> None:
        """Take in what was submitted until now, so that it is answered too; nothing is taken afterwards."""
        with self._wake:
            self._ended = True
        for command in self._commands:
            try:
                command()
            except Exception:
                logger.exception("a command failed while the engine ended")
        self._commands.clear()

    def _loop(self) -> None:
        busy = False
        while self._wait(busy):
            self.turn_began = time.monotonic()
            self.run_commands()
            busy = self._turns.take_turn(busy)

    def _wait(self, busy: bool) -> bool:
        """Sleep until there is something to do. False: stop."""
        if not busy and not self._commands:
            self.turn_began = 0.0
            with self._wake:
                while not self._commands and not self._stopping:
                    self._wake.wait()
        return not self._stopping

    def run_commands(self) -> None:
        """Execute what waits now."""
        commands = self._commands
        for _ in range(len(commands)):
            commands.popleft()()
