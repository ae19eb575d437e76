"""What is measured: every kernel at the sizes of served models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.kernels.attention_cases import decode_attention, prefill_attention
from bench.kernels.case import Case, Place
from bench.kernels.elementwise_cases import elementwise
from bench.kernels.sampling_cases import sampling
from bench.kernels.weight_cases import experts, products

THEMES: dict[str, Callable[[Place], Iterator[Case]]] = {
    "elementwise": elementwise,
    "decode": decode_attention,
    "prefill": prefill_attention,
    "products": products,
    "experts": experts,
    "sampling": sampling,
}
