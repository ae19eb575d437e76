"""Weights of 12 bits against plain ones: the products of an 8B model's layer and vocabulary, then the model itself.

Beyond the rows of the kernel a matrix is widened while the one before is multiplied, which a recording cannot hold:
such products are launched one by one, of both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

import torch
from tandem_worker import kernels
from tandem_worker.kernels.quantized import SplitByteWeight
from tandem_worker.model.backends.triton.layers import MAX_FEW_ROWS, TritonLinear, connect
from torch.nn import functional

from bench.gpu.engine import REAL, Session, measure_decode, measure_first_token
from bench.gpu.item import Figures, Item, Setting, WrongError
from bench.gpu.shapes import Ceiling
from bench.gpu.steps import answer, random_prompts
from bench.kernels.check import LIMITS, compare, poisoned_empty, same_bits
from bench.kernels.measure import graphed, median_seconds

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
"""Outputs and inputs of an 8B layer's products: they exceed a GPU's cache, so weights come from memory each time."""
TINY_SHAPES = ((128, 64), (64, 64), (192, 128))
HEAD = (151936, 4096)
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 2048)
TINY_ROWS = (1, 8, 80)
MODEL = replace(REAL, batches=(1, 8, 64), prompts=(64, 2048), max_rows=64, cache_tokens=24_000)


class Matrices:
    """The same matrices plain and in 12 bits, made when an item first needs them."""

    def __init__(self, shapes: tuple[tuple[int, int], ...], device: torch.device) -> None:
        self.shapes = shapes
        self._device = device

    @cached_property
    def plain(self) -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [
            torch.randn(shape, device=self._device, dtype=torch.bfloat16).mul_(shape[1] ** -0.5)
            for shape in self.shapes
        ]

    @cached_property
    def layers(self) -> list[TritonLinear]:
        """They know each other: the next is widened beside this one's product."""
        layers = []
        for values in self.plain:
            packed = SplitByteWeight.pack(values)
            assert packed is not None
            layers.append(TritonLinear(packed))
        connect(layers)
        return layers

    def inputs(self, rows: int) -> list[torch.Tensor]:
        return [torch.randn(rows, shape[1], device=self._device, dtype=torch.bfloat16) for shape in self.shapes]


def product_items(setting: Setting) -> Iterator[Item]:
    device, ceiling = torch.device(setting.place), Ceiling(setting)
    layer = Matrices(TINY_SHAPES if setting.tiny else SHAPES, device)
    head = Matrices(TINY_SHAPES[-1:] if setting.tiny else (HEAD,), device)
    rows = TINY_ROWS if setting.tiny else ROWS
    yield Item(name="ceilings", run=ceiling.figures)
    for name, matrices, sizes in (("layer", layer, rows), ("vocabulary", head, rows[:2])):
        yield Item(name=f"bits of {name}", run=lambda matrices=matrices: check_bits(matrices), seconds=60)
        for count in sizes:
            yield Item(
                name=f"products of {name} M={count}", seconds=60, needs=(f"bits of {name}",),
                run=lambda matrices=matrices, count=count: compare_products(matrices, count, ceiling, device),
            )  # fmt: skip


@torch.inference_mode()
def check_bits(matrices: Matrices) -> Figures:
    """Every matrix comes back, and takes what it should."""
    like = matrices.plain[0][:1]
    for values, layer in zip(matrices.plain, matrices.layers, strict=True):
        with poisoned_empty():
            found = kernels.widen(like, layer.form)
        if not same_bits(found, values):
            raise WrongError("a matrix comes back with other bits", {"shape": list(values.shape)})
    packed = [layer.form for layer in matrices.layers if isinstance(layer.form, SplitByteWeight)]
    weights = sum(values.numel() for values in matrices.plain)
    return {"bits_per_weight": 8 * sum(form.nbytes for form in packed) / weights}


@torch.inference_mode()
def compare_products(matrices: Matrices, rows: int, ceiling: Ceiling, device: torch.device) -> Figures:
    """Checked against float32 products and themselves, then timed beside the bf16 kernel and cuBLAS."""
    inputs = matrices.inputs(rows)
    error = _check_products(matrices, inputs)
    few = rows <= MAX_FEW_ROWS
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "12 bits": lambda x: [layer(each) for layer, each in zip(matrices.layers, inputs, strict=True)],
        "cuBLAS": lambda x: [functional.linear(each, w) for each, w in zip(inputs, matrices.plain, strict=True)],
    }
    if few:
        calls["bf16 kernel"] = lambda x: [
            kernels.small_batch_linear(each, w) for each, w in zip(inputs, matrices.plain, strict=True)
        ]
    seconds = {
        name: median_seconds(graphed(call, [(inputs[0],)]) if few else lambda call=call: call(inputs[0]), device)
        for name, call in calls.items()
    }
    own = seconds.pop("12 bits")
    weights = sum(values.numel() for values in matrices.plain)
    return {
        "us": own * 1e6,
        **{f"us of {name}": each * 1e6 for name, each in seconds.items()},
        "error": error,
        "share of its limit": ceiling.found.limit_seconds(1.5 * weights, 2 * rows * weights) / own,
        "ratio": min(seconds.values()) / own,
        "of": "the faster of bf16 and cuBLAS",
    }


def _check_products(matrices: Matrices, inputs: list[torch.Tensor]) -> float:
    worst, limit = 0.0, LIMITS[torch.bfloat16]
    runs = []
    for _ in range(3):  # the second and third are widened ahead
        with poisoned_empty():
            runs.append([layer(x) for layer, x in zip(matrices.layers, inputs, strict=True)])
    for x, values, *found in zip(inputs, matrices.plain, *runs, strict=True):
        exact = x.double() @ values.double().t() if x.shape[0] <= 16 else x.float() @ values.float().t()
        whole, row = compare(found[0], exact)
        worst = max(worst, whole, row / 4)
        if not all(same_bits(found[0], other) for other in found[1:]):
            raise WrongError("the bits change from run to run", {"shape": list(values.shape), "rows": x.shape[0]})
    if not worst <= limit:
        raise WrongError("the products are wrong", {"error": worst, "limit": limit})
    return worst


def model_items(setting: Setting) -> Iterator[Item]:
    """Plain and 12 bits in turns: answers, tokens per second and time to the first token."""
    plain, packed = Session(setting), Session(setting, weights="Lossless")
    if not setting.tiny:
        plain.load = packed.load = MODEL
    load = plain.load
    yield Item(name="answers", seconds=150, run=lambda: compare_answers(plain, packed))
    greedy = {"temperature": 0.0}
    for batch in load.batches:
        yield Item(
            name=f"decode x{batch}", seconds=150, needs=("answers",),
            run=lambda batch=batch: in_turns(plain, packed, lambda s: measure_decode(s, batch, greedy), "tokens_per_s"),
        )  # fmt: skip
    for length in load.prompts:
        yield Item(
            name=f"first token of {length}", seconds=90, needs=("answers",),
            run=lambda length=length: in_turns(
                plain, packed, lambda session: measure_first_token(session, length), "milliseconds"
            ),
        )  # fmt: skip


def compare_answers(plain: Session, packed: Session) -> Figures:
    """Greedy answers may part where two tokens are as likely but for a rounding: escapes are added at the end."""
    prompts = random_prompts(min(4, plain.load.max_rows), plain.load.prompt, plain.model.vocab_size)
    new = min(32, plain.load.new_tokens)
    one, other = (
        answer(session.model, prompts, new, recorded=False, ahead=False, temperature=0.0) for session in (plain, packed)
    )
    same = sum(a == b for row, twin in zip(one, other, strict=True) for a, b in zip(row, twin, strict=True))
    total = sum(map(len, one))
    if [row[0] for row in one] != [row[0] for row in other]:
        raise WrongError("first tokens differ", {"plain": one[0][:8], "12 bits": other[0][:8]})
    return {"tokens": total, "equal": same}


def in_turns(plain: Session, packed: Session, run: Callable[[Session], Figures], key: str) -> Figures:
    """One after the other, twice; the better of each, and how many times as fast 12 bits are."""
    found = {name: [run(s)[key] for _ in range(2)] for name, s in (("plain", plain), ("12 bits", packed))}
    best = max if key == "tokens_per_s" else min
    one, other = best(found["plain"]), best(found["12 bits"])
    ratio = other / one if key == "tokens_per_s" else one / other
    return {f"{key} plain": one, key: other, "ratio": ratio, "of": "plain"}
