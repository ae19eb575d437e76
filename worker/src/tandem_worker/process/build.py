"""Builds a worker from its configuration: model, engine, transport, HTTP application, as a graph of steps.

`build_worker` blocks for as long as downloading and loading take and runs on a thread of its own; the HTTP server
answers probes meanwhile. Heavy imports are inside the steps, so that the environment can be set before torch reads it
and what needs no torch does not wait for it.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem_api.launch import SpeculativeConfig, WorkerConfig
from tandem_api.names import Role

from tandem_worker.host.collector import release_collector
from tandem_worker.host.cuda import expects_gpu
from tandem_worker.host.environment import PodFacts, observe_threads
from tandem_worker.host.nvml import open_gpu_reader
from tandem_worker.host.runtime import Runtime
from tandem_worker.model.backends.form import CPU_RATIOS, list_forms, rows_of
from tandem_worker.model.prepared.store import open_store
from tandem_worker.process.figures import Figures, Refusals, join_transports
from tandem_worker.process.graph import Step, run_steps
from tandem_worker.process.memory import MemoryLedger
from tandem_worker.process.progress import STANDBY, StartProgress, Switches
from tandem_worker.process.standby import Standby
from tandem_worker.process.warm_up import Ends, plan_warm_up, warm_up
from tandem_worker.process.worker import Worker
from tandem_worker.server.answer.deltas import DeltaHub

if TYPE_CHECKING:
    import torch
    from starlette.types import ASGIApp

    from tandem_worker.engine.core import EngineCore
    from tandem_worker.engine.execute.pages import BlockPages
    from tandem_worker.group.executor import GroupSeat
    from tandem_worker.group.pods.leading import LeadingPod
    from tandem_worker.model.checkpoint.image import Image
    from tandem_worker.model.contract import CausalLM
    from tandem_worker.model.prepared.kernels import PreparedKernels
    from tandem_worker.model.prepared.weights import PreparedWeights
    from tandem_worker.model.sources.digest import ModelDigest
    from tandem_worker.process.generation import Generation
    from tandem_worker.process.known import KnownStart
    from tandem_worker.process.tiers import Tiers
    from tandem_worker.server.structured.compiler import GrammarCompiler
    from tandem_worker.tiers.shelf import Shelf
    from tandem_worker.transfer.decode.client import TcpPrefillClient
    from tandem_worker.transfer.prefill.server import TcpPrefillServer
    from tandem_worker.transfer.transports import Transports

logger = logging.getLogger(__name__)

_MOST_LOADED = 1 << 30
"""Bytes of libraries' kernels. More is what another process has taken of the device meanwhile."""


def build_worker(
    config: WorkerConfig,
    pod: PodFacts,
    runtime: Runtime,
    progress: StartProgress,
    switches: Switches,
    group: LeadingPod | None = None,
    refusals: Mapping[str, Refusals] | None = None,
    standby: Standby | None = None,
) -> Worker:
    """`group`: the other ranks, where there are any, which this process leads. `refusals`: of ports, by their names.
    `standby`: where the start waits for an order; None: it does not.

    Raises StartupError with a reason for everything a person can mend, GroupLostError when another rank cannot go on.
    What else was begun goes on then: whoever calls this ends the process.
    """
    start = _Start(config, pod, runtime, progress, switches, group, refusals or {}, standby)
    built: Worker = run_steps(start.list_steps(), progress)["worker"]
    start.settle(built)
    return built


def list_start_steps(config: WorkerConfig, pod: PodFacts, runtime: Runtime, progress: StartProgress) -> list[Step]:
    """The steps of a start of one rank, for whoever wants what some of them leave behind."""
    return _Start(config, pod, runtime, progress, Switches(), None, {}).list_steps()


class _Start:
    """The steps of one start. What they have in common is known before; what one makes the others are given."""

    def __init__(
        self,
        config: WorkerConfig,
        pod: PodFacts,
        runtime: Runtime,
        progress: StartProgress,
        switches: Switches,
        group: LeadingPod | None,
        refusals: Mapping[str, Refusals],
        standby: Standby | None = None,
    ) -> None:
        self._standby = standby
        self._config, self._pod, self._runtime = config, pod, runtime
        self._progress, self._switches, self._group, self._refusals = progress, switches, group, refusals
        self._store = open_store(config.model.cache_dir)
        self._on_gpu = expects_gpu(config.device)
        self._kernels: PreparedKernels | None = None
        self._known: KnownStart | None = None
        self._draft: Path | None = None
        """The files of the draft head that the configuration names, once they are fetched."""

    def list_steps(self) -> list[Step]:
        """What a start consists of, and what each part needs."""

        def step(name: str, what: str, run: Callable[..., Any], *needs: str) -> Step:
            return Step(name=name, what=what, run=run, needs=needs)

        return [
            step("fetch", "fetching the model", self._fetch),
            step("libraries", "loading libraries", _import_libraries),
            step("server", "loading the server", _import_server),
            step("device", "opening the device", self._open_device, "libraries"),
            step("hashing", "listing the model's files", self._hash, "fetch"),
            step("tokenizer", "loading the tokenizer", self._load_tokenizer, "fetch"),
            step("digest", "hashing the model", _await_digest, "hashing"),
            self._describe_seat(),
            *self._describe_standby(),
            *self._describe_weights(),
            step("memory", "looking at the memory", _open_ledger, "device"),
            step("ends", "reading the generation settings", self._observe_generation, "fetch", "tokenizer"),
            step("grammars", "starting the grammar process", self._open_grammars, "tokenizer", "weights", "ends"),
            step("transports", "opening the KV transports", self._open_transports, "libraries"),
            step("client", "opening the KV client", self._open_client, "transports"),
            step("arena", "measuring activations", self._measure_arena, "weights", "memory", "fetch"),
            step(
                *("engine", "allocating the KV cache", self._build_engine),
                *("weights", "arena", "digest", "seat", "client", "ends", "memory"),
            ),
            step("tiers", "opening the tiers", self._open_tiers, "engine", "digest"),
            step("warm_up", "warming up", self._warm_up, "engine", "weights", "tiers"),
            step(
                *("transport", "starting the KV transport", self._connect_transport),
                *("engine", "client", "digest", "seat", "tiers", "transports", "warm_up"),
            ),
            step(
                *("worker", "building the application", self._build_worker),
                *("engine", "weights", "tokenizer", "grammars", "ends", "client", "transport", "prepared", "memory"),
                *("tiers", "server", "warm_up"),
            ),
        ]

    def settle(self, worker: Worker) -> None:
        """Everything that stays is there."""
        release_collector()
        self._progress.be_ready()
        _log_ready(worker, self._progress)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _fetch(self) -> Path:
        """The model's files, and the processes of the other ranks, which load from them."""
        from tandem_worker.model.sources.digest import has_come_since
        from tandem_worker.model.sources.resolve import resolve_draft, resolve_model

        began = time.time()
        path = resolve_model(self._config.model, self._pod.token, self._runtime.files)
        if has_come_since(path, began):
            self._progress.origin = "downloaded"
        self._draft = resolve_draft(self._config, self._pod.draft_token or self._pod.token)
        if self._group is not None:
            self._group.start(path, self._draft)
        return path

    def _hash(self, path: Path) -> list[ModelDigest]:
        """Hashing goes on, on threads of its own, beside reading: both read the same pages of the same files."""
        from tandem_worker.model.sources.digest import ModelDigest

        return [ModelDigest(each) for each in (path, self._draft) if each is not None]

    def _open_device(self, _: None) -> torch.device:
        from tandem_worker.host.devices import check_host_memory, resolve_device

        device = resolve_device(self._config.device)
        check_host_memory(self._config.kv.host_memory_bytes, device.type)
        if device.type == "cuda":
            from tandem_worker.model.prepared.kernels import name_compiler, open_prepared_kernels

            self._kernels = open_prepared_kernels(self._store)
            self._kernels.restore()
            self._runtime.vitals.start_thread("name-compiler", name_compiler)
        return device

    @property
    def _gate(self) -> tuple[str, ...]:
        """What a step needs that takes memory of the model's size."""
        return () if self._standby is None else ("standby",)

    def _describe_standby(self) -> list[Step]:
        """After everything that an order need not wait for."""
        if self._standby is None:
            return []
        needs = ("fetch", "device", "server", "digest", "ends", "memory", "client")
        return [Step(name="standby", what="on standby until a request comes", run=self._rest, needs=needs)]

    def _rest(self, path: Path, device: torch.device, *_: object) -> None:
        assert self._standby is not None
        _rehearse(path, device, self._draft, self._config.speculative)
        self._standby.wait()

    def _describe_weights(self) -> list[Step]:
        """What an earlier start prepared is found by the digest. For a GPU nothing is prepared, so nothing waits for
        the digest there, and files are read before torch is there."""
        needs, gate = ("fetch", "device", "seat", "prepared", "memory"), self._gate
        what, loading = "looking for prepared weights", "loading weights"
        if not self._on_gpu:
            return [
                Step(name="prepared", what=what, run=self._open_prepared, needs=("digest", "seat", *gate)),
                Step(name="weights", what=loading, run=self._load_weights, needs=needs),
            ]
        return [
            Step(name="prepared", what=what, run=lambda *_: None, needs=gate),
            Step(name="image", what="reading weights", run=self._read_image, needs=("fetch", *gate)),
            Step(name="weights", what=loading, run=self._load_weights, needs=(*needs, "image")),
        ]

    def _read_image(self, path: Path, *_: None) -> Image | None:
        """The model's files in the GPU's memory; not in a group, each rank of which takes a part."""
        from tandem_worker.model.checkpoint.image import read_image

        return None if self._group is not None else read_image(path, observe_threads())

    def _describe_seat(self) -> Step:
        """Without other ranks it needs nothing: prepared weights are read then while torch is imported."""
        if self._group is None:
            return Step(name="seat", what="taking a seat alone", run=lambda: None)
        return Step(name="seat", what="waiting for the group", run=self._take_seat, needs=("fetch", "device"))

    def _take_seat(self, path: Path, device: torch.device) -> GroupSeat:
        from tandem_worker.host.devices import resolve_dtype

        assert self._group is not None
        return self._group.form(path, device, resolve_dtype(self._config.dtype))

    def _open_prepared(self, digest: str, seat: GroupSeat | None, *_: None) -> PreparedWeights:
        """What an earlier start made of these weights for this rank, being read from here on."""
        from tandem_worker.model.prepared.weights import open_prepared_weights

        share = None if seat is None else seat.context.share
        facts = {"device": self._config.device, "dtype": self._config.dtype, "share": share}
        forms = list_forms(self._config.weights, rows_of(self._config), CPU_RATIOS)
        return open_prepared_weights(self._store, digest, facts, forms)

    def _load_tokenizer(self, path: Path) -> Any:
        from tandem_worker.model.tokenizer import load_tokenizer

        return load_tokenizer(path, self._store)

    def _load_weights(
        self,
        path: Path,
        device: torch.device,
        seat: GroupSeat | None,
        prepared: PreparedWeights | None,
        memory: MemoryLedger,
        image: Image | None = None,
    ) -> CausalLM:
        """This rank's share."""
        from tandem_worker.host.devices import resolve_dtype
        from tandem_worker.model.draft.attach import attach_head
        from tandem_worker.model.load import load_model
        from tandem_worker.model.weighing import count_matrices, count_weight_bytes
        from tandem_worker.parallel.context import SINGLE

        context, dtype = SINGLE if seat is None else seat.context, resolve_dtype(self._config.dtype)
        weights, rows = self._config.weights, rows_of(self._config)
        if image is not None and device.type != "cuda":
            image.close()  # the driver has a GPU that torch cannot use
            image = None
        model = load_model(
            path,
            device=device,
            dtype=dtype,
            context=context,
            prepared=prepared,
            weights=weights,
            rows=rows,
            told=memory.note_choice,
            image=image,
        )
        memory.image = image
        model = attach_head(model, path, self._draft, self._config.speculative)
        memory.by_kind["weights"] = count_weight_bytes(model)
        memory.matrices = count_matrices(model)
        if prepared is not None and prepared.is_whole and self._progress.origin == "files":
            self._progress.origin = "prepared"
        return model

    def _open_grammars(self, tokenizer: Any, model: CausalLM, generation: Generation) -> GrammarCompiler:
        """Start its process before the first request is there where answers are generated, but not in one that was
        woken: somebody waits, for an answer without a grammar more likely than not."""
        from tandem_worker.server.structured.compiler import GrammarCompiler

        grammars = GrammarCompiler(tokenizer, model.vocab_size, generation.end_tokens)
        if self._generates(model) and not self._is_woken:
            grammars.start()
        return grammars

    def _generates(self, model: CausalLM) -> bool:
        return model.embedding is None and self._config.role is not Role.PREFILL

    @property
    def _is_woken(self) -> bool:
        return self._progress.origin == STANDBY

    def _observe_generation(self, path: Path, tokenizer: Any) -> Generation:
        from tandem_worker.process.generation import observe_generation

        return observe_generation(path, tokenizer, self._config.generation_settings)

    def _open_transports(self, _: None) -> Transports | None:
        """What `spec.kv.transport` asks for, where this role moves blocks."""
        if self._config.role is Role.UNIFIED:
            return None  # and nothing of it is imported
        from tandem_worker.transfer.transports import open_transports

        return open_transports(self._config.kv, self._pod.pod_ip)

    def _open_client(self, transports: Transports | None) -> TcpPrefillClient | None:
        if self._config.role is not Role.DECODE:
            return None
        from tandem_worker.transfer.decode.client import TcpPrefillClient

        return TcpPrefillClient(
            verify=self._config.kv.verify,
            ring=self._runtime.peers,
            vitals=self._runtime.vitals,
            transports=transports,
        )

    def _measure_arena(self, model: CausalLM, memory: MemoryLedger, path: Path) -> int | None:
        """Bytes for activations. In a group all ranks would have to compute at once, so it is not done there; on a CPU
        nothing is sized by it, so a worker that was woken, for which somebody waits, does without."""
        from tandem_worker.engine.execute.arena import measure_arena
        from tandem_worker.engine.speculation import count_logits_rows

        if self._group is not None or (self._is_woken and model.device.type == "cpu"):
            return None
        limits = self._config.scheduler
        if self._kernels is not None:
            from tandem_worker.process.known import find_known_start

            records = self._pod.cuda_graphs
            self._known = find_known_start(
                self._store, self._kernels, self._config, path, records=records, draft=self._draft
            )
        others = memory.observe_other()
        arena = memory.by_kind["arena"] = self._measure(
            "activations",
            lambda: measure_arena(
                model,
                max_batch_tokens=limits.max_batch_tokens,
                max_rows=count_logits_rows(self._config.speculative, limits.max_running_requests),
                block_size=self._config.kv.block_size,
            ),
        )
        if self._known is None:
            return arena
        # What the largest step loads onto the device: where it is not run, that comes when the blocks have their place.
        loaded = self._known.measure("libraries", lambda: min(_MOST_LOADED, max(0, memory.observe_other() - others)))
        return arena + loaded if self._known.is_complete else arena

    def _measure(self, name: str, run: Callable[[], int]) -> int:
        return run() if self._known is None else self._known.measure(name, run)

    def _build_engine(
        self,
        model: CausalLM,
        arena: int | None,
        digest: str,
        seat: GroupSeat | None,
        client: TcpPrefillClient | None,
        generation: Generation,
        memory: MemoryLedger,
    ) -> tuple[EngineCore, Ends]:
        from tandem_worker.engine.build import build_engine

        ends = Ends()
        engine = build_engine(
            model,
            self._config,
            ends.deliver,
            client,
            eos_token_ids=generation.end_tokens,
            model_digest=digest,
            cuda_graphs=self._pod.cuda_graphs and seat is None,
            arena_bytes=arena,
            measure=self._measure,
            ranks=seat,
            vitals=self._runtime.vitals,
        )
        cache = engine.kv_cache
        memory.by_kind["kv"] = cache.num_blocks * cache.spec.bytes_per_block
        return engine, ends

    def _warm_up(self, built: tuple[EngineCore, Ends], model: CausalLM, _: Tiers | None) -> None:
        engine, ends = built
        if engine.graphs_pending:
            engine.hold_recordings(held=True)
        compiles = model.device.type == "cuda" and (self._known is None or not self._known.is_complete)
        warm_up(engine, ends, plan_warm_up(engine.max_model_len, model.embedding, compiles=compiles))

    def _open_tiers(self, built: tuple[EngineCore, Ends], digest: str) -> Tiers | None:
        kv = self._config.kv
        below = kv.disk is not None or kv.store is not None or bool(kv.host_memory_bytes)
        if not below and (not kv.peers or self._group is not None):
            return None  # and nothing of it is imported
        from tandem_worker.process.tiers import open_tiers

        return open_tiers(built[0], self._config, self._pod, digest, self._runtime)

    def _connect_transport(
        self,
        built: tuple[EngineCore, Ends],
        client: TcpPrefillClient | None,
        digest: str,
        seat: GroupSeat | None,
        tiers: Tiers | None,
        transports: Transports | None,
        _: None,
    ) -> TcpPrefillServer | None:
        shelf = None if tiers is None else tiers.shelf
        return _connect_transport(
            built[0], client, self._config, self._pod, self._runtime, digest, seat, shelf, transports
        )

    def _build_worker(
        self,
        built: tuple[EngineCore, Ends],
        model: CausalLM,
        tokenizer: Any,
        grammars: GrammarCompiler,
        generation: Generation,
        client: TcpPrefillClient | None,
        server: TcpPrefillServer | None,
        prepared: PreparedWeights | None,
        memory: MemoryLedger,
        tiers: Tiers | None,
        *_: None,
    ) -> Worker:
        from tandem_worker.engine.execute.pages import BlockPages

        engine, hub = built[0], DeltaHub()
        engine.begin_measuring()
        engine.deliver_to(hub.deliver)
        memory.by_kind["other"] = memory.observe_other()
        pages = BlockPages(engine.kv_cache, lambda: engine.stats().kv_blocks_touched)
        figures = Figures(
            self._config,
            self._pod,
            engine,
            transport=join_transports(server, client),
            grammars=grammars,
            draining=lambda: self._switches.draining,
            gpu=open_gpu_reader(model.device),
            matrices=memory.matrices,
            weights=memory.weights,
            memory_bytes=lambda: _list_memory(memory, pages, engine),
            start=self._progress,
            refusals=self._refusals,
            spans=self._runtime.tracer.counts,
            files=self._runtime.files,
            others=lambda: {} if self._group is None else self._group.leader.gpus,
            tiers=tiers,
        )
        return Worker(
            config=self._config,
            app=self._build_app(model, engine, hub, figures, tokenizer, grammars, generation),
            figures=figures,
            engine=engine,
            pages=pages,
            prepared=prepared,
            kernels=self._kernels,
            known=self._known,
            hub=hub,
            prefill_server=server,
            prefill_client=client,
            tiers=tiers,
            grammars=grammars,
            grammars_later=self._is_woken and self._generates(model),
            group=self._group,
        )

    def _build_app(
        self,
        model: CausalLM,
        engine: EngineCore,
        hub: DeltaHub,
        figures: Figures,
        tokenizer: Any,
        grammars: GrammarCompiler,
        generation: Generation,
    ) -> ASGIApp:
        from tandem_worker.server.app import build_app

        return build_app(
            engine,
            tokenizer,
            self._config,
            hub=hub,
            pod_name=self._pod.pod,
            ready=lambda: self._switches.ready,
            draining=lambda: self._switches.draining,
            max_model_len=engine.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=generation.end_tokens,
            embedding=model.embedding,
            observer=figures.observe_request,
            preparation=figures.preparation,
            grammars=grammars,
            sampling=generation.sampling,
            tracer=self._runtime.tracer,
            prompts=figures.prompts,
        )


def _import_libraries() -> None:
    """Torch and what is built on it: the longest step on a CPU, and one that holds the interpreter's lock."""
    import tandem_worker.engine.build
    import tandem_worker.engine.execute.arena
    import tandem_worker.model.load  # noqa: F401


def _import_server() -> None:
    """What answers requests and moves blocks, while others wait for files."""
    import tandem_worker.server.app
    import tandem_worker.server.structured.compiler  # noqa: F401


def _rehearse(path: Path, device: torch.device, draft: Path | None, speculative: SpeculativeConfig) -> None:
    """Import what the rest of a start of this model imports, and say what is wrong with it before it is asked for. Its
    weights are opened, not read. Raises StartupError."""
    import tandem_worker.engine.execute.pages
    import tandem_worker.group.transport
    import tandem_worker.model.weighing
    import tandem_worker.transfer.prefill.server  # noqa: F401
    from tandem_worker.model.backends.select import find_backend, select_backend
    from tandem_worker.model.families.registry import find_family
    from tandem_worker.model.load import open_checkpoint, resolve_dtype

    config, source = open_checkpoint(path)
    if draft is not None:
        from tandem_worker.model.draft.load import check_draft

        check_draft(draft, config)
    elif speculative.method == "Draft":
        from tandem_worker.model.draft.own import check_own_head

        check_own_head(config, source)
    find_family(config.architecture)
    find_backend(select_backend(device, resolve_dtype(device, config.dtype)))


def _await_digest(hashing: list[ModelDigest]) -> str:
    from tandem_worker.model.sources.digest import await_digests

    return await_digests(hashing)


def _open_ledger(device: torch.device) -> MemoryLedger:
    return MemoryLedger(on_gpu=device.type == "cuda")


def _connect_transport(
    engine: EngineCore,
    client: TcpPrefillClient | None,
    config: WorkerConfig,
    pod: PodFacts,
    runtime: Runtime,
    digest: str,
    seat: GroupSeat | None,
    shelf: Shelf | None,
    transports: Transports | None,
) -> TcpPrefillServer | None:
    """The KV port of a worker that takes orders or gives its blocks away; decode workers' client, joined with the
    engine."""
    if config.role is Role.UNIFIED and shelf is None:
        return None
    from tandem_worker.group.transport import group_identity, start_server
    from tandem_worker.transfer.blocks import BlockSpace
    from tandem_worker.transfer.contract import Identity
    from tandem_worker.transfer.prefill.server import TcpPrefillServer

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
        if shelf is None:
            return None
    server = TcpPrefillServer(
        engine=engine if config.role is Role.PREFILL else None,
        space=space,
        identity=identity,
        host=runtime.host,
        port=config.kv.port,
        group=leader,
        ring=runtime.peers,
        vitals=runtime.vitals,
        shelf=shelf,
        tracer=runtime.tracer,
        transports=transports if config.role is Role.PREFILL else None,
    )
    return start_server(server, config.kv.port)


def _list_memory(memory: MemoryLedger, pages: BlockPages, engine: EngineCore) -> dict[str, int]:
    """Bytes by what holds them now. Guesses have an entry where there are any."""
    now = {"kv_resident": pages.resident_bytes, "graphs": engine.graph_bytes}
    guesses = engine.stats().guess_bytes
    return memory.by_kind | now | ({} if guesses is None else {"guesses": guesses})


def _log_ready(worker: Worker, progress: StartProgress) -> None:
    engine, config = worker.engine, worker.config
    gib = {f"{kind}_gib": round(size / 2**30, 3) for kind, size in worker.figures.memory_bytes().items()}
    logger.info(
        "serving %s",
        config.served_name,
        extra={
            "device": str(engine.kv_cache.layers[0].device),
            "dtype": str(engine.kv_cache.spec.dtype).removeprefix("torch."),
            "kv_blocks": engine.kv_cache.num_blocks,
            "max_model_len": engine.max_model_len,
            "memory": gib | {"peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)},
            "seconds": {name: round(seconds, 3) for name, seconds in progress.seconds().items()},
            "steps": progress.describe(),
        },
    )
