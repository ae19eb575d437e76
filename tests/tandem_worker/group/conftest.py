"""Groups of real processes around an engine in this one."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_api.keys import open_ring
from tandem_api.launch import (
    GroupConfig,
    KVConfig,
    ModelSource,
    Parallelism,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tandem_api.names import Role
from tandem_worker.engine.build import build_engine
from tandem_worker.engine.core import EngineCore
from tandem_worker.engine.schedule.params import GenerationRequest, SamplingParams
from tandem_worker.group.control.link import Loss
from tandem_worker.group.pods.leading import LeadingPod
from tandem_worker.group.topology import plan_node
from tandem_worker.host.environment import PodFacts
from tandem_worker.host.runtime import Runtime
from tandem_worker.host.vitals import Vitals
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.draft.attach import attach_head
from tandem_worker.model.load import load_model
from tandem_worker.model.sources.digest import ModelDigest, await_digests
from tandem_worker.model.sources.resolve import resolve_draft
from tandem_worker.parallel.context import SINGLE, ParallelContext
from tandem_worker.parallel.groups import leave_group

from tests.tandem_worker.engine.rig import Collector

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a small random model per family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folders = {}
    for family, options in FAMILIES.items():
        folders[family] = tmp_path_factory.mktemp(family)
        torch.manual_seed(11)
        config = AutoConfig.for_model(
            family, vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=12, max_position_embeddings=512, initializer_range=0.3, **options,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folders[family])
    return folders


class EngineRig:
    """An engine and what it answers, greedily."""

    def __init__(
        self,
        engine: EngineCore,
        out: Collector,
        group: LeadingPod | None = None,
        causes: queue.SimpleQueue[Loss] | None = None,
    ) -> None:
        self.engine, self.out, self.group, self.causes = engine, out, group, causes

    def answer(self, prompts: list[list[int]], max_tokens: int = 6, **options: Any) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | options))
        first = self.out.num_finished
        for index, prompt in enumerate(prompts):
            self.engine.submit(
                GenerationRequest(request_id=f"{first}-{index}", prompt_token_ids=tuple(prompt), sampling=sampling)
            )
        self.out.wait_finished(first + len(prompts))
        return [self.out.tokens(f"{first}-{index}") for index in range(len(prompts))]


def build_config(
    path: Path, kv: dict[str, int], parallelism: dict[str, int], speculative: SpeculativeConfig | None = None
) -> WorkerConfig:
    return WorkerConfig(
        model_name="m",
        served_name="m",
        role=Role.UNIFIED,
        revision="r",
        model=ModelSource(uri=f"file://{path}"),
        device="CPU",
        dtype="Float32",
        kv=KVConfig(**{"memory_bytes": 1 << 20, "block_size": 4} | kv),
        scheduler=SchedulerConfig(max_batch_tokens=320, max_running_requests=16),
        group=GroupConfig(parallelism=Parallelism(**parallelism)),
        speculative=speculative or SpeculativeConfig(),
    )


@contextlib.contextmanager
def run_group(
    path: Path,
    speculative: SpeculativeConfig | None = None,
    *,
    kv: dict[str, int] | None = None,
    **parallelism: int,
) -> Iterator[EngineRig]:
    torch.set_num_threads(1)
    config = build_config(path, kv or {}, parallelism, speculative)
    draft = resolve_draft(config)

    def load(context: ParallelContext = SINGLE) -> CausalLM:
        model = load_model(path, device=CPU, dtype=torch.float32, context=context)
        return attach_head(model, path, draft, config.speculative)

    if config.group.parallelism.num_ranks == 1:
        out = Collector()
        engine = build_engine(load(), config, out)
        yield EngineRig(engine, out)
        engine.stop()
        return
    pod = PodFacts(
        pod="m-0", namespace="n", pod_ip="127.0.0.1", token=None, log_level="WARNING", termination_path=Path("/absent")
    )
    place = plan_node(config.group, pod.pod)
    causes: queue.SimpleQueue[Loss] = queue.SimpleQueue()
    runtime = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals())
    group = LeadingPod(config, pod, place, runtime, on_lost=causes.put, on_leaving=lambda: None)
    group.start(path, draft)
    try:
        seat, out = group.form(path, CPU, torch.float32), Collector()
        digest = await_digests([ModelDigest(each) for each in (path, draft) if each is not None])
        engine = build_engine(load(seat.context), config, out, model_digest=digest, ranks=seat)
        yield EngineRig(engine, out, group, causes)
        engine.stop()
        assert (engine.failure is None) == (group.leader.cause == "the group was stopped")
    finally:
        group.stop()
        leave_group()


@pytest.fixture
def start_group() -> Callable[..., AbstractContextManager[EngineRig]]:
    return run_group
