"""Decides where to cut a model's layers into pipeline stages, from what the layers cost."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem_worker.model.assembly.decoder import DecoderLM, PartSeconds
from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.contract import ForwardBatch, allocate_kv_cache
from tandem_worker.model.load import load_model, open_checkpoint
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.parallel.shape import GroupShape

logger = logging.getLogger(__name__)

_PROBE_SEQUENCES = 64
_PROBE_REPEATS = 5
_LAYER = "model.layers."


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What the parts of a model cost, in any one unit."""

    layers: tuple[float, ...]
    first: float
    """What the first stage alone has: the embedding."""
    last: float
    """What the last stage alone has: final norm and output projection."""


def plan_stages(
    path: Path, shape: GroupShape, *, device: torch.device, dtype: torch.dtype | None
) -> tuple[int, ...] | None:
    """Decide where the stages of the model at `path` end; None when there is one stage."""
    if shape.pp == 1:
        return None
    # With expert ranks no rank can compute a layer alone: it holds some of the experts only.
    alone = shape.ep == 1
    costs = measure_costs(path, device=device, dtype=dtype, tp_size=shape.tp) if alone else estimate_costs(path)
    ends = balance_stages(costs, shape.pp)
    logger.info("pipeline stages end at layers %s", list(ends), extra={"costs": costs})
    return ends


def balance_stages(costs: StageCosts, num_stages: int) -> tuple[int, ...]:
    """Index of the layer after each stage's last one, so that the slowest stage takes as little time as possible.

    Every stage has a layer at least. Dynamic programming over (stages, layers): O(num_stages * layers^2).
    """
    layers = costs.layers
    count = len(layers)
    if not 1 <= num_stages <= count:
        raise ValueError(f"{count} layers cannot make {num_stages} stages")
    sums = [0.0]
    for cost in layers:
        sums.append(sums[-1] + cost)

    def stage_cost(start: int, end: int) -> float:
        return sums[end] - sums[start] + costs.first * (start == 0) + costs.last * (end == count)

    best = [stage_cost(0, end) for end in range(count + 1)]  # of one stage over the first `end` layers
    cuts: list[list[int]] = []
    for stage in range(1, num_stages):
        chosen, lowest = [0] * (count + 1), [float("inf")] * (count + 1)
        for end in range(stage + 1, count + 1):
            cost, cut = min((max(best[cut], stage_cost(cut, end)), cut) for cut in range(stage, end))
            lowest[end], chosen[end] = cost, cut
        best = lowest
        cuts.append(chosen)
    ends = [count]
    for chosen in reversed(cuts):
        ends.append(chosen[ends[-1]])
    return tuple(reversed(ends))


def measure_costs(path: Path, *, device: torch.device, dtype: torch.dtype | None, tp_size: int) -> StageCosts:
    """Seconds of a decode step of 64 sequences on this device, by part, for the model at `path`.

    One layer of each kind is loaded as one tensor rank would hold it, timed without the other ranks, and dropped again.
    Layers are of one kind when their tensors have the same names and shapes.
    """
    config, source = open_checkpoint(path)
    kinds = [frozenset(layer.items()) for layer in _layer_tensors(source, config.num_layers)]
    seconds: dict[Hashable, PartSeconds] = {}
    for layer, kind in enumerate(kinds):
        if kind not in seconds:
            context = ParallelContext(tp_size=tp_size, layers=range(layer, layer + 1))
            model = load_model(path, device=device, dtype=dtype, context=context)
            assert isinstance(model, DecoderLM), "every family is one"
            seconds[kind] = _time_model(model)
    probe = seconds[kinds[0]]
    return StageCosts(layers=tuple(seconds[kind].layers for kind in kinds), first=probe.enter, last=probe.leave)


def estimate_costs(path: Path) -> StageCosts:
    """Elements of the weights of each part: what a decode step reads, where nothing can be measured."""
    config, source = open_checkpoint(path)
    tensors = _layer_tensors(source, config.num_layers)
    layers = (float(sum(math.prod(shape) for shape in layer.values())) for layer in tensors)
    head = float(config.vocab_size * config.hidden_size)
    return StageCosts(layers=tuple(layers), first=0.0, last=head)


def _layer_tensors(source: WeightSource, num_layers: int) -> list[dict[str, tuple[int, ...]]]:
    """Per layer its tensors' names within the layer, and their shapes."""
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(num_layers)]
    for name in source.names():
        place, _, rest = name.partition(_LAYER)[2].partition(".")
        if place.isdigit() and int(place) < num_layers:
            found[int(place)][rest] = source.shape(name)
    return found


def _time_model(model: DecoderLM) -> PartSeconds:
    cache = allocate_kv_cache(model.kv_cache_spec(16), 2, model.device)
    count = _PROBE_SEQUENCES
    zeros = torch.zeros(count, dtype=torch.int64, device=model.device)
    batch = ForwardBatch(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=zeros,
        block_tables=torch.zeros((count, 1), dtype=torch.int32, device=model.device),
        query_start=torch.arange(count + 1, dtype=torch.int32, device=model.device),
        context_lens=torch.ones(count, dtype=torch.int32, device=model.device),
        logits_rows=torch.arange(count, device=model.device),
        query_lens_host=(1,) * count,
        context_lens_host=(1,) * count,
    )
    with torch.inference_mode():
        model.time_parts(batch, cache)  # compiles kernels, touches memory
        runs = [model.time_parts(batch, cache) for _ in range(_PROBE_REPEATS)]
    return PartSeconds(*(statistics.median(part) for part in zip(*runs, strict=True)))
