"""Builds a worker from its configuration: model, engine, transport, HTTP application, in phases that are told.

`build_worker` blocks for as long as downloading and loading take and runs on a thread of its own; the HTTP server
answers probes meanwhile. Heavy imports are inside, so that the environment can be set before torch reads it.
"""

from __future__ import annotations

import gc
import logging
import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tandem_api.launch import WorkerConfig
from tandem_api.names import Role

from tandem_worker.host.devices import resolve_device, resolve_dtype
from tandem_worker.host.environment import PodFacts
from tandem_worker.host.runtime import Runtime
from tandem_worker.process.end_tokens import observe_end_tokens
from tandem_worker.process.figures import Figures, Refusals, open_gpu_reader
from tandem_worker.process.memory import MemoryLedger
from tandem_worker.process.progress import StartProgress, Switches
from tandem_worker.process.warm_up import Ends, plan_warm_up, warm_up
from tandem_worker.process.worker import Worker
from tandem_worker.server.deltas import DeltaHub

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tandem_worker.engine.core import EngineCore
    from tandem_worker.group.executor import GroupSeat
    from tandem_worker.group.pods.leading import LeadingPod
    from tandem_worker.model.contract import CausalLM
    from tandem_worker.server.structured.compiler import GrammarCompiler
    from tandem_worker.transfer.decode.client import TcpPrefillClient
    from tandem_worker.transfer.prefill.server import TcpPrefillServer

logger = logging.getLogger(__name__)


def build_worker(
    config: WorkerConfig,
    pod: PodFacts,
    runtime: Runtime,
    progress: StartProgress,
    switches: Switches,
    group: LeadingPod | None = None,
    refusals: Mapping[str, Refusals] | None = None,
) -> Worker:
    """`group`: the other ranks, where there are any, which this process leads. `refusals`: of ports, by their names.

    Raises StartupError with a reason for everything a person can mend, GroupLostError when another rank cannot go on.
    """
    return _Start(config, pod, runtime, progress, switches, group).build(refusals or {})


class _Start:
    """One start, in phases."""

    def __init__(
        self,
        config: WorkerConfig,
        pod: PodFacts,
        runtime: Runtime,
        progress: StartProgress,
        switches: Switches,
        group: LeadingPod | None,
    ) -> None:
        self._config, self._pod, self._runtime = config, pod, runtime
        self._enter, self._progress = progress.enter, progress
        self._switches, self._group = switches, group

    def build(self, refusals: Mapping[str, Refusals]) -> Worker:
        self._fetch()
        model = self._load()
        engine, client, hub = self._start_engine(model)
        self._enter("starting the KV transport")
        server = _connect_transport(engine, client, self._config, self._pod, self._runtime, self._digest, self._seat)
        figures = Figures(
            self._config,
            self._pod,
            engine,
            transport=server or client,
            grammars=self._grammars,
            draining=lambda: self._switches.draining,
            gpu=open_gpu_reader(self._device),
            memory_bytes=self._memory.by_kind,
            refusals=refusals,
            spans=self._runtime.tracer.counts,
            files=self._runtime.files,
        )
        app = self._build_app(model, engine, hub, figures)
        _settle(self._progress)
        _log_ready(self._config, model, engine, self._progress, self._memory)
        return Worker(
            config=self._config,
            app=app,
            figures=figures,
            engine=engine,
            hub=hub,
            prefill_server=server,
            prefill_client=client,
            grammars=self._grammars,
            group=self._group,
        )

    def _fetch(self) -> None:
        """The model's files, and the processes of the other ranks, which load from them."""
        from tandem_worker.model.sources.resolve import resolve_model

        self._enter("fetching the model")
        self._path = resolve_model(self._config.model, self._pod.token, self._runtime.files)
        if self._group is not None:
            self._group.start(self._path)

    def _load(self) -> CausalLM:
        """Tokenizer, this rank's weights, grammars; the files are hashed meanwhile."""
        self._enter("loading libraries")
        from tandem_worker.model.load import load_model
        from tandem_worker.model.sources.digest import ModelDigest
        from tandem_worker.model.tokenizer import leave_torch_out, load_tokenizer
        from tandem_worker.parallel.context import SINGLE

        config, path = self._config, self._path
        device = self._device = resolve_device(config.device)
        self._memory = MemoryLedger(on_gpu=device.type == "cuda")
        hashing = ModelDigest(path)
        self._enter("loading the tokenizer")
        leave_torch_out()
        self._tokenizer = load_tokenizer(path)
        self._seat = None
        if self._group is not None:
            self._enter("waiting for the group")
            self._seat = self._group.form(path, device, resolve_dtype(config.dtype))
        self._enter("loading weights")
        self._before = self._memory.observe()
        context = SINGLE if self._seat is None else self._seat.context
        model = load_model(path, device=device, dtype=resolve_dtype(config.dtype), context=context)
        self._memory.by_kind["weights"] = max(0, self._memory.observe() - self._before)
        self._end_tokens = observe_end_tokens(path, self._tokenizer)
        self._grammars = _open_grammars(self._tokenizer, model, config, self._end_tokens)
        self._enter("hashing the model")
        self._digest = hashing.result()
        return model

    def _start_engine(self, model: CausalLM) -> tuple[EngineCore, TcpPrefillClient | None, DeltaHub]:
        """Warm, and delivering to the hub."""
        from tandem_worker.engine.build import build_engine

        config, memory, ranks = self._config, self._memory, self._seat
        arena = None if ranks is not None else _measure_arena(model, config, self._progress, memory)
        self._enter("allocating the KV cache")
        ends, client = Ends(), _open_client(config, self._runtime)
        engine = build_engine(
            model,
            config,
            ends.deliver,
            client,
            eos_token_ids=self._end_tokens,
            model_digest=self._digest,
            cuda_graphs=self._pod.cuda_graphs and ranks is None,
            arena_bytes=arena,
            ranks=ranks,
            vitals=self._runtime.vitals,
        )
        cache = engine.kv_cache
        memory.by_kind["kv"] = cache.num_blocks * cache.spec.bytes_per_block
        memory.by_kind["graphs"] = engine.graph_bytes
        memory.by_kind["other"] = memory.observe_other(self._before)
        self._enter("warming up")
        on_gpu = self._device.type == "cuda"
        warm_up(engine, ends, plan_warm_up(engine.max_model_len, model.embedding, on_gpu=on_gpu))
        engine.begin_measuring()
        hub = DeltaHub()
        engine.deliver_to(hub.deliver)
        return engine, client, hub

    def _build_app(self, model: CausalLM, engine: EngineCore, hub: DeltaHub, figures: Figures) -> ASGIApp:
        from tandem_worker.server.app import build_app

        return build_app(
            engine,
            self._tokenizer,
            self._config,
            hub=hub,
            pod_name=self._pod.pod,
            ready=lambda: self._switches.ready,
            draining=lambda: self._switches.draining,
            max_model_len=engine.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=self._end_tokens,
            embedding=model.embedding,
            observer=figures.observe_request,
            preparation=figures.preparation,
            grammars=self._grammars,
            tracer=self._runtime.tracer,
        )


def _settle(progress: StartProgress) -> None:
    """Everything that stays is there."""
    # A full collection looks at every object there is, 0.3 s for those of the libraries alone, and all streams wait.
    gc.collect()
    gc.freeze()
    # The collector looks at old objects again when a quarter as many have become old since: a quarter of what is left
    # now, not of what has just been frozen. Ended connections are cycles that hold what they had read.
    gc.collect()
    progress.enter("ready")


def _open_grammars(
    tokenizer: Any, model: CausalLM, config: WorkerConfig, end_tokens: frozenset[int]
) -> GrammarCompiler:
    """Where answers are generated its process is there before the first request is."""
    from tandem_worker.server.structured.compiler import GrammarCompiler

    grammars = GrammarCompiler(tokenizer, model.vocab_size, end_tokens)
    if model.embedding is None and config.role is not Role.PREFILL:
        grammars.start()
    return grammars


def _open_client(config: WorkerConfig, runtime: Runtime) -> TcpPrefillClient | None:
    from tandem_worker.transfer.decode.client import TcpPrefillClient

    if config.role is not Role.DECODE:
        return None
    return TcpPrefillClient(verify=config.kv.verify, ring=runtime.peers, vitals=runtime.vitals)


def _measure_arena(model: CausalLM, config: WorkerConfig, progress: StartProgress, memory: MemoryLedger) -> int:
    """Bytes for activations. In a group all ranks would have to compute at once, so it is not done there."""
    from tandem_worker.engine.execute.arena import measure_arena

    progress.enter("measuring activations")
    limits = config.scheduler
    memory.by_kind["arena"] = measure_arena(
        model,
        max_batch_tokens=limits.max_batch_tokens,
        max_rows=limits.max_running_requests,
        block_size=config.kv.block_size,
    )
    return memory.by_kind["arena"]


def _connect_transport(
    engine: EngineCore,
    client: TcpPrefillClient | None,
    config: WorkerConfig,
    pod: PodFacts,
    runtime: Runtime,
    digest: str,
    seat: GroupSeat | None,
) -> TcpPrefillServer | None:
    from tandem_worker.group.transport import group_identity, start_server
    from tandem_worker.transfer.blocks import BlockSpace
    from tandem_worker.transfer.contract import Identity
    from tandem_worker.transfer.prefill.server import TcpPrefillServer

    if config.role not in {Role.PREFILL, Role.DECODE}:
        return None
    leader = None
    if seat is None or seat.plan is None:
        space = BlockSpace(engine.kv_cache)
        layout = space.layout.fingerprint
        identity = Identity(worker=pod.pod, revision=config.revision, model_digest=digest, layout=layout)
    else:
        leader = seat.leader
        space = BlockSpace(engine.kv_cache, seat.plan.ranks[0].shard, seat.plan.layout)
        identity = group_identity(config, pod, digest, seat.plan)
    if client is not None:
        if leader is not None:
            leader.on_answer = client.handle
        client.bind(engine, space, identity, leader)
        return None
    server = TcpPrefillServer(
        engine=engine,
        space=space,
        identity=identity,
        host=runtime.host,
        port=config.kv.port,
        group=leader,
        ring=runtime.peers,
        vitals=runtime.vitals,
        tracer=runtime.tracer,
    )
    return start_server(server, config.kv.port)


def _log_ready(
    config: WorkerConfig, model: CausalLM, engine: EngineCore, progress: StartProgress, memory: MemoryLedger
) -> None:
    gib = {f"{kind}_gib": round(size / 2**30, 3) for kind, size in memory.by_kind.items()}
    logger.info(
        "serving %s",
        config.served_name,
        extra={
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_blocks": engine.kv_cache.num_blocks,
            "max_model_len": engine.max_model_len,
            "memory": gib | {"peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)},
            "seconds": progress.seconds | {"total": round(sum(progress.seconds.values()), 3)},
        },
    )
