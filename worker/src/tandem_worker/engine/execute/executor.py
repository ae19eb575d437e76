"""Runs the model on a plan: copies, one forward pass, logits of the rows that were asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from tandem_api.launch import WorkerConfig

from tandem_worker.engine.errors import GroupLostError
from tandem_worker.engine.execute.batch import BatchBuilder
from tandem_worker.engine.execute.cuda_graphs import CudaRecorder, DecodeGraphs, Recorder, plan_batch_sizes
from tandem_worker.engine.execute.host_copy import HostCopier, HostCopy, build_copier
from tandem_worker.engine.execute.step import StepOutput
from tandem_worker.engine.sample.contract import CheckedRows, Sampler
from tandem_worker.engine.sample.host_sampler import HostSampler
from tandem_worker.engine.schedule.host_cache import Moves
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.host.uploads import upload, wait_for_launched
from tandem_worker.model.contract import CausalLM, ForwardBatch, KVCache

if TYPE_CHECKING:
    from tandem_worker.engine.execute.heads import HeadRanks
    from tandem_worker.engine.execute.host_pool import HostPool

logger = logging.getLogger(__name__)


class ModelExecutor:
    num_ranks = 1
    """Processes that compute a step."""
    can_abandon = True
    """A step may be left between layers, by an exception of its `on_layer`."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        *,
        max_rows: int,
        max_model_len: int,
        copier: HostCopier | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        block_size = kv_cache.spec.block_size
        self._max_rows = max_rows
        self._max_blocks = -(-max_model_len // block_size)
        self._builder = BatchBuilder(
            max_rows=max_rows, max_blocks=self._max_blocks, block_size=block_size, device=model.device
        )
        self._graphs: DecodeGraphs | None = None
        self._recorder: Recorder | None = None
        self._graph_seconds = 0.0
        self.host_pool: HostPool | None = None
        self.fetch_seconds = 0.0
        """In which a block comes from the host."""
        self.graph_bytes = 0
        """What the recordings of decode steps take."""
        self.sampler = build_sampler(model.vocab_size, model.device)
        self._copier = copier or build_copier(model.device)
        self._chosen: torch.Tensor | None = None
        self.on_compute: Callable[[], None] | None = None
        """Called when a step is prepared and its layers are computed next."""

    @property
    def num_layers(self) -> int:
        """Layers that have KV on this rank."""
        return len(self.kv_cache.layers)

    def record_graphs(
        self, recorder: Recorder | None = None, *, num_now: int | None = None, max_rows: int | None = None
    ) -> None:
        """From now on decode steps replay recordings. The model must allow it (see `cuda_graphs`).

        The `num_now` smallest batch sizes are recorded at once, None being all; the others by `record_next_graph`.
        `max_rows`: the largest; None: as many as sequences run.
        """
        sizes = plan_batch_sizes(max_rows or self._max_rows)
        recorder = recorder or CudaRecorder(self.model.device)
        num_later = 0 if num_now is None else max(0, len(sizes) - num_now)
        with self._recording(recorder), torch.inference_mode():
            self._graphs = DecodeGraphs(
                self.model,
                self.kv_cache,
                max_blocks=self._max_blocks,
                batch_sizes=sizes,
                recorder=recorder,
                num_later=num_later,
            )
        self._recorder = recorder
        self._log_recorded(sizes[: len(sizes) - num_later])

    @property
    def graphs_pending(self) -> int:
        """Batch sizes that are still to be recorded."""
        return 0 if self._graphs is None else len(self._graphs.pending)

    def record_next_graph(self) -> None:
        """Record one batch size more. Where that fails the rest is left: such steps go on without a recording."""
        graphs, recorder = self._graphs, self._recorder
        assert graphs is not None
        assert recorder is not None
        size = graphs.pending[-1]
        try:
            with self._recording(recorder), torch.inference_mode():
                graphs.record_next()
        except Exception as error:  # of the device, a compiler, a full disk: none of it is worth the streams that run
            left = [size, *graphs.pending]
            graphs.pending.clear()
            logger.warning("decode steps of %s sequences stay unrecorded: %s (%s)", left, error, type(error).__name__)
            return
        self._log_recorded([size])

    @contextmanager
    def _recording(self, recorder: Recorder) -> Iterator[None]:
        """Counts time and memory of what is recorded."""
        before, began = recorder.memory_bytes(), time.perf_counter()
        yield
        self.graph_bytes += max(0, recorder.memory_bytes() - before)
        self._graph_seconds += time.perf_counter() - began

    def _log_recorded(self, sizes: list[int]) -> None:
        logger.log(
            logging.DEBUG if self.graphs_pending else logging.INFO,
            "decode steps are recorded",
            extra={
                "batch_sizes": sizes,
                "seconds": round(self._graph_seconds, 3),
                "gib": round(self.graph_bytes / 2**30, 3),
            },
        )

    def add_host_pool(self, num_blocks: int) -> None:
        """Have blocks of host memory, block 0 included, for `move_blocks`."""
        from tandem_worker.engine.execute.host_pool import HostPool

        self.host_pool = HostPool(self.kv_cache, num_blocks)
        self.fetch_seconds = self.host_pool.measure_fetch_seconds()

    def move_blocks(self, moves: Moves, *, lane: int = 0, settle: bool = False) -> None:
        """Launch copies to the host and back, for the steps of a lane. `settle`: return when they are made. What fails
        here is lost, so an error is not to be survived."""
        assert self.host_pool is not None
        self.host_pool.launch(moves)
        if settle:
            self.host_pool.settle()

    @property
    def host_seconds(self) -> tuple[float, float]:
        """Seconds that copies to the host took so far, and those from there."""
        return (0.0, 0.0) if self.host_pool is None else self.host_pool.count_seconds()

    def await_fetches(self) -> None:
        """Whatever is launched next finds what was fetched from the host, in every layer."""
        if self.host_pool is not None:
            self.host_pool.await_all()

    def run(self, plan: StepPlan, on_layer: Callable[[int], None] | None) -> StepOutput:
        """Compute the plan; `on_layer(i)` is called when layer i of its chunks is written."""
        step, layout = self._builder.describe(plan)
        self._copy_blocks(step.copies)
        batch = self._builder.assemble(
            step, on_layer, self._chosen, before_layer=self._before_layer, on_compute=self.on_compute
        )
        if self._graphs is not None and on_layer is None:
            self.await_fetches()  # a recording waits for nothing
            logits = self._graphs.run(batch)
            if logits is not None:
                return StepOutput(logits, layout)
        return StepOutput(self._compute(batch), layout)

    @property
    def _before_layer(self) -> Callable[[int], None] | None:
        pool = self.host_pool
        return pool.before_layer if pool is not None and pool.is_pending else None

    def _compute(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self.model.forward(batch, self.kv_cache)
        assert self._before_layer is None, "a layer was computed without waiting for its blocks"
        return logits

    def run_lanes(self, plans: Sequence[StepPlan | None]) -> list[StepOutput | None]:
        """One forward pass of every lane; None: this one has nothing to compute. A single process has one lane."""
        raise NotImplementedError("only the ranks of a group compute several lanes")

    def settle(self) -> None:
        """Return when nothing that was launched is still to be computed: its blocks may be let go of."""
        wait_for_launched(self.model.device)

    def _copy_blocks(self, copies: np.ndarray) -> None:
        """Copy-on-write: sources are as they were before this step. Targets are distinct."""
        if not len(copies):
            return
        self.await_fetches()
        pairs = upload(copies, self.model.device)
        for layer in self.kv_cache.layers:
            layer.index_copy_(0, pairs[:, 1], layer.index_select(0, pairs[:, 0]))

    def choose(self, output: StepOutput) -> HostCopy:
        """Launch the choice of every next token, `[N]` int64 in the order of `layout.sequences`.

        The next `run` may decode them before they are on the host.
        """
        logits, layout = output
        assert not layout.waves, "guesses are checked when tokens are known, by the host"
        if layout.rows is not None:
            logits = logits[upload(np.array(layout.rows, dtype=np.int64), logits.device)]
        tokens = self.sampler.choose_tokens(logits, layout.sequences)
        for place, sequence in enumerate(layout.sequences):
            sequence.chosen_at = place
        self._chosen = tokens.clamp(min=0)  # after NO_TOKEN nothing follows, but the lookup must not fail
        return self._copier.start(tokens)

    def check(self, output: StepOutput) -> HostCopy | None:
        """Launch the choice of the tokens at all places of a step with guesses; None where they are chosen one wave
        after another, because somebody has to see one before the next can be chosen."""
        checked = output.layout.checked
        if not may_check_at_once(self.sampler, checked):
            return None
        return self._copier.start(self.sampler.choose_checked(output.logits, checked))

    def build_head_ranks(self, lane: int) -> HeadRanks:
        """The place where the draft head of a lane is computed; a single process has one lane."""
        from tandem_worker.engine.execute.heads import HeadHere

        assert lane == 0
        return HeadHere(self.model, self.kv_cache)

    def load_logits(self, data: bytes) -> torch.Tensor | None:
        """`[1, vocab]` from a peer's bytes; None when they are not one row of this model's."""
        if len(data) != self.model.vocab_size * 4:
            return None
        return torch.frombuffer(bytearray(data), dtype=torch.float32)[None].to(self.model.device)

    @staticmethod
    def dump_logits(row: torch.Tensor) -> bytes:
        """One row `[vocab]` as float32 bytes in native order: what `load_logits` reads."""
        return row.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()


class ExecutorBuilder(Protocol):
    """For a worker of several ranks: what they agree on, and the executor that makes all of them compute."""

    @property
    def num_lanes(self) -> int:
        """Batches that are computed side by side."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory that every rank has, block 0 included, once that is agreed; 0: none is wanted."""
        ...

    def agree_num_blocks(self, model: CausalLM, config: WorkerConfig, digest: str) -> int:
        """KV blocks that every rank has room for; `model` says of its rows from then on what all ranks keep. Raises
        GroupLostError, and StartupError where ranks differ."""
        ...

    def build_executor(self, model: CausalLM, kv_cache: KVCache, *, max_rows: int, max_model_len: int) -> ModelExecutor:
        """Raises GroupLostError."""
        ...


def may_check_at_once(sampler: Sampler, checked: Sequence[CheckedRows]) -> bool:
    """Whether `choose_checked` may choose for these: prompts' first tokens come by another way, and a grammar's mask is
    written when the token before is known."""
    return sampler.checks_at_once and all(
        each.sequence.output and each.sequence.sampler_state.grammar is None for each in checked
    )


def is_fatal(error: BaseException) -> bool:
    """After a device error no later call on that device can be trusted; without one rank the others compute nothing."""
    fatal = (GroupLostError, getattr(torch, "AcceleratorError", GroupLostError))
    return isinstance(error, fatal) or "CUDA error" in str(error)


def build_sampler(vocab_size: int, device: torch.device) -> Sampler:
    """The sampler that suits a device."""
    if device.type != "cuda":
        return HostSampler()
    from tandem_worker.engine.sample.device_sampler import DeviceSampler

    return DeviceSampler(vocab_size, device)
