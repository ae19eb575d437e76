"""Builds a worker from its configuration: model, engine, transport, HTTP application, in phases that are told.

`build_worker` blocks for as long as downloading and loading take and runs on a thread of its own; the HTTP server
answers probes meanwhile. Heavy imports are inside, so that the environment can be set before torch reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem_api.launch import Device, DType, WorkerConfig
from tandem_api.names import Role

from tandem_worker.environment import PodFacts
from tandem_worker.errors import GroupLostError, StartupError
from tandem_worker.observe.figures import Figures, Refusals, open_gpu_reader
from tandem_worker.runtime import Runtime
from tandem_worker.server.hub import DeltaHub
from tandem_worker.warm_up import Delivery, plan_warm_up, warm_up

if TYPE_CHECKING:
    import torch
    from starlette.types import ASGIApp

    from tandem_worker.engine.core import EngineCore
    from tandem_worker.engine.group_executor import GroupSeat
    from tandem_worker.group.leading import LeadingPod
    from tandem_worker.models.base import CausalLM
    from tandem_worker.structured.compiler import GrammarCompiler
    from tandem_worker.transfer.client import TcpPrefillClient
    from tandem_worker.transfer.server import TcpPrefillServer

logger = logging.getLogger(__name__)


class Progress:
    """Which phase the start is in, and how long each one took. Written by the building thread, read by probes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.phase = "starting"
        self.seconds: dict[str, float] = {}
        self._since = clock()

    def enter(self, phase: str) -> None:
        now = self._clock()
        self.seconds[self.phase] = round(now - self._since, 3)
        self.phase, self._since = phase, now
        logger.info("%s", phase)


@dataclass(slots=True, kw_only=True)
class Worker:
    """Everything that runs in this process but the HTTP servers."""

    config: WorkerConfig
    app: ASGIApp
    """The inference API."""
    figures: Figures
    engine: EngineCore
    hub: DeltaHub
    prefill_server: TcpPrefillServer | None
    prefill_client: TcpPrefillClient | None
    grammars: GrammarCompiler
    group: LeadingPod | None = None

    @property
    def idle(self) -> bool:
        return self.engine.idle and self.hub.num_open == 0

    def drain(self) -> None:
        self.engine.drain()
        if self.prefill_server is not None:
            self.prefill_server.drain()

    def close(self) -> None:
        if self.prefill_server is not None:
            self.prefill_server.close()
        if self.prefill_client is not None:
            self.prefill_client.close()
        self.engine.stop(timeout=5.0)
        self.grammars.close()
        if self.group is not None:
            self.group.stop()

    async def fail(self, cause: str, grace_seconds: float = 2.0) -> None:
        """End every request with an error, for the engine cannot; on the event loop. Waits until they are answered."""
        self.engine.fail(GroupLostError(cause))
        self.hub.fail_all(f"The worker has lost a part of itself: {cause}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self.hub.num_open:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


@dataclass(slots=True, kw_only=True)
class Switches:
    """What the process is up to; the HTTP application looks at it."""

    ready: bool = False
    draining: bool = False


@dataclass(slots=True)
class _Memory:
    """Bytes by what they hold: what the process, or on a GPU the device, grew by in each phase."""

    on_gpu: bool
    by_kind: dict[str, int] = field(default_factory=dict)

    def observe(self) -> int:
        if self.on_gpu:
            import torch

            return torch.cuda.memory_allocated()
        return _resident_bytes()

    def observe_other(self, before: int) -> int:
        """What neither tensors nor graphs take: `before` loading, or on a GPU the driver's and the libraries' share."""
        if not self.on_gpu:
            return before
        import torch

        free, total = torch.cuda.mem_get_info()
        return max(0, total - free - torch.cuda.memory_reserved())


def load_config(path: Path) -> WorkerConfig:
    """Raises StartupError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise StartupError("InvalidConfig", f"The configuration {path} cannot be read: {error}") from error
    try:
        return WorkerConfig.model_validate_json(text)
    except ValueError as error:
        raise StartupError("InvalidConfig", f"The configuration {path} is not valid: {error}") from error


def build_worker(
    config: WorkerConfig,
    pod: PodFacts,
    runtime: Runtime,
    progress: Progress,
    switches: Switches,
    group: LeadingPod | None = None,
    refusals: Mapping[str, Refusals] | None = None,
) -> Worker:
    """`group`: the other ranks, where there are any, which this process leads. `refusals`: of ports, by their names.

    Raises StartupError with a reason for everything a person can mend, GroupLostError when another rank cannot go on.
    """
    from tandem_worker.sources.digest import ModelDigest
    from tandem_worker.sources.resolve import resolve_model

    progress.enter("fetching the model")
    path = resolve_model(config.model, pod.token)
    if group is not None:
        group.start(path)
    progress.enter("loading libraries")
    from tandem_worker.engine.build import build_engine
    from tandem_worker.models.loader import load_model
    from tandem_worker.models.tokenizer import load_tokenizer
    from tandem_worker.parallel.context import SINGLE
    from tandem_worker.server.app import build_app

    device = resolve_device(config.device)
    memory = _Memory(on_gpu=device.type == "cuda")
    hashing = ModelDigest(path)
    progress.enter("loading the tokenizer")
    tokenizer = load_tokenizer(path)
    seat = None
    if group is not None:
        progress.enter("waiting for the group")
        seat = group.form(path, device, resolve_dtype(config.dtype))
    progress.enter("loading weights")
    before = memory.observe()
    model = load_model(
        path, device=device, dtype=resolve_dtype(config.dtype), context=SINGLE if seat is None else seat.context
    )
    memory.by_kind["weights"] = max(0, memory.observe() - before)
    end_tokens = observe_end_tokens(path, tokenizer)
    grammars = _open_grammars(tokenizer, model, config, end_tokens)
    progress.enter("hashing the model")
    digest = hashing.result()
    arena = None if seat is not None else _measure_arena(model, config, progress, memory)
    progress.enter("allocating the KV cache")
    hub = DeltaHub()
    delivery = Delivery(hub)
    client = _open_client(config, runtime)
    engine = build_engine(
        model,
        config,
        delivery,
        client,
        eos_token_ids=end_tokens,
        model_digest=digest,
        cuda_graphs=pod.cuda_graphs and seat is None,
        arena_bytes=arena,
        group=seat,
        vitals=runtime.vitals,
    )
    cache = engine.kv_cache
    memory.by_kind["kv"] = cache.num_blocks * cache.spec.bytes_per_block
    memory.by_kind["graphs"] = engine.graph_bytes
    memory.by_kind["other"] = memory.observe_other(before)
    progress.enter("warming up")
    warm_up(engine, delivery, plan_warm_up(engine.max_model_len, model.embedding, on_gpu=device.type == "cuda"))
    progress.enter("starting the KV transport")
    server = _connect_transport(engine, client, config, pod, runtime, digest, seat)
    figures = Figures(
        config,
        pod,
        engine,
        transport=server or client,
        grammars=grammars,
        draining=lambda: switches.draining,
        gpu=open_gpu_reader(device),
        memory_bytes=memory.by_kind,
        refusals=refusals or {},
    )
    app = build_app(
        engine,
        tokenizer,
        config,
        hub=hub,
        pod_name=pod.pod,
        ready=lambda: switches.ready,
        draining=lambda: switches.draining,
        max_model_len=engine.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=end_tokens,
        embedding=model.embedding,
        observer=figures.observe_request,
        preparation=figures.preparation,
        grammars=grammars,
    )
    _settle(progress)
    _log_ready(config, model, engine, progress, memory)
    return Worker(
        config=config,
        app=app,
        figures=figures,
        engine=engine,
        hub=hub,
        prefill_server=server,
        prefill_client=client,
        grammars=grammars,
        group=group,
    )


def _settle(progress: Progress) -> None:
    """Everything that stays is there."""
    # A full collection looks at every object there is, 0.3 s for those of the libraries alone, and all streams wait.
    gc.collect()
    gc.freeze()
    progress.enter("ready")


def _open_grammars(
    tokenizer: Any, model: CausalLM, config: WorkerConfig, end_tokens: frozenset[int]
) -> GrammarCompiler:
    """Where answers are generated its process is there before the first request is."""
    from tandem_worker.structured.compiler import GrammarCompiler

    grammars = GrammarCompiler(tokenizer, model.vocab_size, end_tokens)
    if model.embedding is None and config.role is not Role.PREFILL:
        grammars.start()
    return grammars


def _open_client(config: WorkerConfig, runtime: Runtime) -> TcpPrefillClient | None:
    from tandem_worker.transfer.client import TcpPrefillClient

    if config.role is not Role.DECODE:
        return None
    return TcpPrefillClient(verify=config.kv.verify, ring=runtime.peers, vitals=runtime.vitals)


def _measure_arena(model: CausalLM, config: WorkerConfig, progress: Progress, memory: _Memory) -> int:
    """Bytes for activations. In a group all ranks would have to compute at once, so it is not done there."""
    from tandem_worker.engine.arena import measure_arena

    progress.enter("measuring activations")
    limits = config.scheduler
    memory.by_kind["arena"] = measure_arena(
        model,
        max_batch_tokens=limits.max_batch_tokens,
        max_rows=limits.max_running_requests,
        block_size=config.kv.block_size,
    )
    return memory.by_kind["arena"]


def resolve_device(device: Device, local_rank: int = 0) -> torch.device:
    """`local_rank` chooses among the GPUs of the pod. Raises StartupError."""
    import torch

    if device == "CPU" or (device == "Auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartupError(
            "DeviceUnavailable",
            "spec.engine.device is CUDA, but the container sees no GPU: ask for one in resources.limits, "
            "for example nvidia.com/gpu, or set the device to Auto or CPU.",
        )
    if local_rank >= torch.cuda.device_count():
        raise StartupError(
            "DeviceUnavailable",
            f"The container sees {torch.cuda.device_count()} GPUs, too few for a rank each: ask for as many in "
            "resources.limits as there are ranks in a pod.",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def resolve_dtype(dtype: DType) -> torch.dtype | None:
    """None leaves the choice to the loader, which knows the checkpoint."""
    import torch

    return {"Auto": None, "BFloat16": torch.bfloat16, "Float16": torch.float16, "Float32": torch.float32}[dtype]


def observe_end_tokens(path: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's, and those that the model's generation settings list."""
    from tandem_worker.server.model import end_tokens

    found = set(end_tokens(tokenizer))
    settings = path / "generation_config.json"
    if settings.is_file():
        try:
            listed = json.loads(settings.read_text()).get("eos_token_id")
        except (ValueError, AttributeError):
            logger.warning("%s cannot be read; its end tokens are not used", settings.name)
            listed = None
        found.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    return frozenset(int(token) for token in found)


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
    from tandem_worker.transfer.base import Identity
    from tandem_worker.transfer.blocks import BlockSpace
    from tandem_worker.transfer.server import TcpPrefillServer

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
    )
    return start_server(server, config.kv.port)


def _log_ready(config: WorkerConfig, model: CausalLM, engine: EngineCore, progress: Progress, memory: _Memory) -> None:
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


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()
