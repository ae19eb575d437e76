"""What is measured: every kernel at the sizes of served models. Building a case needs a GPU, importing does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tandem_worker import kernels
from tandem_worker.kernels.quantized import Fp8Weight, Int4Weight, Mxfp4Weight, Weight

from bench.kernels.measure import Case

HALF = torch.bfloat16
COLD_BYTES = 256 << 20
"""Inputs rotate until they exceed the L2 cache several times."""


def randn(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def rotate(make: Callable[[], tuple], num_bytes: float) -> list[tuple]:
    return [make() for _ in range(max(1, min(16, int(COLD_BYTES // max(1.0, num_bytes)) + 1)))]


def elementwise() -> Iterator[Case]:
    for tokens in (64, 8192):
        size = tokens * 4096 * 2
        yield Case(
            name=f"rms_norm [{tokens}, 4096]", bytes=2 * size, run=lambda x, w: kernels.rms_norm(x, w, 1e-5),
            inputs=rotate(lambda t=tokens: (randn(t, 4096), randn(4096)), 2 * size),
        )  # fmt: skip
        yield Case(
            name=f"residual_rms_norm [{tokens}, 4096]", bytes=4 * size,
            run=lambda x, r, w: kernels.residual_rms_norm(x, r, w, 1e-5),
            inputs=rotate(lambda t=tokens: (randn(t, 4096), randn(t, 4096), randn(4096)), 4 * size),
        )  # fmt: skip
        wide = tokens * 12288 * 2
        yield Case(
            name=f"silu_mul [{tokens}, 2 x 12288]", bytes=3 * wide, run=kernels.silu_mul,
            inputs=rotate(lambda t=tokens: (randn(t, 24576),), 3 * wide),
        )  # fmt: skip
        yield Case(
            name=f"swiglu_clamped [{tokens}, 2 x 12288]", bytes=3 * wide, run=kernels.swiglu_clamped,
            inputs=rotate(lambda t=tokens: (randn(t, 24576),), 3 * wide),
        )  # fmt: skip
        yield from attention_inputs(tokens)


def attention_inputs(tokens: int) -> Iterator[Case]:
    """Rotary embedding, KV writes and their fusion for Qwen3-8B (32 query heads, 8 KV heads, D = 128)."""
    cos, sin = randn(40960, 64, dtype=torch.float32), randn(40960, 64, dtype=torch.float32)
    positions = torch.randint(0, 40960, (tokens,), device="cuda")
    blocks = 4 * tokens // 16 + 8
    cache = randn(blocks, 16, 2, 8, 128).permute(0, 2, 3, 1, 4)
    latent_cache = randn(blocks, 16, 576)
    slots = torch.randperm(blocks * 16, device="cuda")[:tokens]
    row = tokens * 128 * 2
    tables = tokens * 64 * 2 * 4
    norms = {"q_norm": randn(128), "k_norm": randn(128)}
    yield Case(
        name=f"rope [{tokens}, 32 + 8, 128]", bytes=2 * 40 * row + tables,
        run=lambda q, k: kernels.rope(q, k, cos, sin, positions),
        inputs=rotate(lambda: (randn(tokens, 32, 128), randn(tokens, 8, 128)), 2 * 40 * row),
    )  # fmt: skip
    yield Case(
        name=f"kv_write [{tokens}, 8, 128]", bytes=4 * 8 * row,
        run=lambda k, v: kernels.kv_write(k, v, cache, slots),
        inputs=rotate(lambda: (randn(tokens, 8, 128), randn(tokens, 8, 128)), 4 * 8 * row),
    )  # fmt: skip
    yield Case(
        name=f"latent_write [{tokens}, 576]", bytes=2 * tokens * 576 * 2,
        run=lambda latent: kernels.latent_write(latent, latent_cache, slots),
        inputs=rotate(lambda: (randn(tokens, 576),), 2 * tokens * 576 * 2),
    )  # fmt: skip
    yield Case(
        name=f"fused_qkv_norm_rope_kv_write [{tokens}, 48, 128]", bytes=2 * 48 * row + tables,
        run=lambda qkv: kernels.fused_qkv_norm_rope_kv_write(qkv, cos, sin, positions, cache, slots, **norms),
        inputs=rotate(lambda: (randn(tokens, 48 * 128),), 2 * 48 * row),
    )  # fmt: skip


def shuffled_tables(num_sequences: int, context: int, block_size: int) -> tuple[torch.Tensor, int]:
    """Block tables of sequences of equal length over a scattered block space, and its size."""
    per_sequence = -(-context // block_size)
    num_blocks = num_sequences * per_sequence
    return torch.randperm(num_blocks, device="cuda").int().view(num_sequences, per_sequence), num_blocks


def decode_attention() -> Iterator[Case]:
    for name, heads, kv_heads, dim in (("Qwen3-8B", 32, 8, 128), ("Llama-3 70B", 64, 8, 128), ("gpt-oss", 64, 8, 64)):
        for batch, context in ((1, 32768), (32, 8192), (256, 1024)):
            tables, num_blocks = shuffled_tables(batch, context, 16)
            lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
            size = batch * context * kv_heads * dim * 2 * 2
            yield Case(
                name=f"paged_decode_attention {name} B={batch} C={context}", bytes=size,
                flops=4 * batch * context * heads * dim,
                run=lambda q, cache, tables=tables, lens=lens: kernels.paged_decode_attention(
                    q, cache.permute(0, 2, 3, 1, 4), tables, lens, scale=0.1
                ),
                inputs=rotate(
                    lambda b=batch, n=num_blocks, h=heads, k=kv_heads, d=dim: (randn(b, h, d), randn(n, 16, 2, k, d)),
                    size,
                ),
            )  # fmt: skip
    for batch, context in ((1, 32768), (32, 8192), (128, 4096)):
        tables, num_blocks = shuffled_tables(batch, context, 64)
        lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        size = batch * context * 576 * 2
        yield Case(
            name=f"mla_decode_attention H=128 B={batch} C={context}", bytes=size,
            flops=2 * batch * context * 128 * (576 + 512),
            run=lambda q, cache, tables=tables, lens=lens: kernels.mla_decode_attention(
                q, cache, tables, lens, latent_dim=512, scale=0.1
            ),
            inputs=rotate(lambda b=batch, n=num_blocks: (randn(b, 128, 576), randn(n, 64, 576)), size),
        )  # fmt: skip


def prefill_attention() -> Iterator[Case]:
    for heads, kv_heads, dim in ((32, 8, 128), (64, 8, 64)):
        for new, context in ((8192, 8192), (2048, 32768)):
            tables, num_blocks = shuffled_tables(1, context, 16)
            starts = torch.tensor([0, new], dtype=torch.int32, device="cuda")
            lens = torch.tensor([context], dtype=torch.int32, device="cuda")
            seen = new * (context - new) + new * new / 2
            yield Case(
                name=f"paged_prefill_attention {heads}/{kv_heads} D={dim} new={new} C={context}",
                bytes=(2 * new * heads + 2 * context * kv_heads) * dim * 2, flops=4 * seen * heads * dim,
                run=lambda q, cache, t=tables, s=starts, n=lens: kernels.paged_prefill_attention(
                    q, cache.permute(0, 2, 3, 1, 4), t, s, n, scale=0.1
                ),
                inputs=[(randn(new, heads, dim), randn(num_blocks, 16, 2, kv_heads, dim))],
            )  # fmt: skip
    starts = torch.tensor([0, 4096], dtype=torch.int32, device="cuda")
    yield Case(
        name="mla_prefill_attention H=128 new=4096", bytes=4096 * (128 * (192 + 256 + 128) + 64) * 2,
        flops=2 * 4096 * 4096 / 2 * 128 * (192 + 128),
        run=lambda q, kv, rope: kernels.mla_prefill_attention(q, kv, rope, starts, starts, scale=0.1),
        inputs=[(randn(4096, 128, 192), randn(4096, 128, 256), randn(4096, 64))],
    )  # fmt: skip
    tables, num_blocks = shuffled_tables(1, 32768, 64)
    whole = torch.tensor([0, 32768], dtype=torch.int32, device="cuda")
    yield Case(
        name="latent_gather C=32768", bytes=2 * 32768 * 576 * 2,
        run=lambda cache: kernels.latent_gather(cache, tables, whole, 32768),
        inputs=rotate(lambda: (randn(num_blocks, 64, 576),), 32768 * 576 * 2),
    )  # fmt: skip


def random_weight(form: str, *shape: int) -> Weight:
    """Random bits in a form; scales keep the products finite."""
    *lead, rows, columns = shape
    match form:
        case "bf16":
            return randn(*shape) * 0.02
        case "fp8":
            scale = torch.rand(*lead, -(-rows // 128), -(-columns // 128), device="cuda") * 0.02
            return Fp8Weight(data=randn(*shape).to(torch.float8_e4m3fn), scale=scale)
        case "int4":
            packed = torch.randint(-(2**31), 2**31 - 1, (*lead, rows, columns // 8), dtype=torch.int32, device="cuda")
            return Int4Weight(packed=packed, scale=randn(*lead, rows, columns // 32) * 0.02)
    packed = torch.randint(0, 256, (*lead, rows, columns // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(118, 122, (*lead, rows, columns // 32), dtype=torch.uint8, device="cuda")
    return Mxfp4Weight(packed=packed, scale=scale)


BYTES_PER_WEIGHT = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 2 / 32, "mxfp4": 0.5 + 1 / 32}


def products() -> Iterator[Case]:
    like = randn(1)
    for form, per_weight in BYTES_PER_WEIGHT.items():
        if form != "bf16":
            yield Case(
                name=f"widen {form} N=4096 K=12288", bytes=4096 * 12288 * (per_weight + 2),
                run=lambda w: kernels.widen(like, w),
                inputs=rotate(lambda f=form: (random_weight(f, 4096, 12288),), 4096 * 12288 * (per_weight + 2)),
            )  # fmt: skip
        for rows in (1, 8, 64):
            size = 4096 * 12288 * per_weight
            yield Case(
                name=f"small_batch_linear {form} M={rows} N=4096 K=12288", bytes=size, flops=2 * rows * 4096 * 12288,
                run=kernels.small_batch_linear,
                inputs=rotate(lambda f=form, m=rows: (randn(m, 12288), random_weight(f, 4096, 12288)), size),
            )  # fmt: skip
            yield Case(
                name=f"gate_up_silu {form} M={rows} I=12288 K=4096", bytes=2 * size,
                flops=4 * rows * 4096 * 12288, run=kernels.gate_up_silu,
                inputs=rotate(lambda f=form, m=rows: (randn(m, 4096), random_weight(f, 24576, 4096)), 2 * size),
            )  # fmt: skip


def experts() -> Iterator[Case]:
    """Kimi K2's layer on one of eight ranks: 48 of 384 experts, H = 7168, I = 2048, 8 choices, all of them local."""
    hidden, width, num_experts = 7168, 2048, 48
    for form, per_weight in BYTES_PER_WEIGHT.items():
        gate_up = random_weight(form, num_experts, 2 * width, hidden)
        down = random_weight(form, num_experts, hidden, width)
        for tokens in (1, 4, 16, 64, 2048):
            logits = randn(tokens, num_experts, dtype=torch.float32)
            weights, ids = kernels.moe_route(logits, 8)
            touched = num_experts * (1 - (1 - 8 / num_experts) ** tokens)  # of random choices, on average
            yield Case(
                name=f"fused_moe {form} T={tokens}", bytes=touched * 3 * hidden * width * per_weight,
                flops=2 * tokens * 8 * 3 * hidden * width,
                run=lambda x, g=gate_up, d=down, w=weights, i=ids: kernels.fused_moe(x, g, d, w, i),
                inputs=[(randn(tokens, hidden),) for _ in range(2)],
            )  # fmt: skip
    yield Case(
        name="moe_route [8192, 256]", bytes=8192 * (256 * 4 + 64), run=lambda x: kernels.moe_route(x, 8),
        inputs=rotate(lambda: (randn(8192, 256, dtype=torch.float32),), 8192 * 1088),
    )  # fmt: skip


def sampling() -> Iterator[Case]:
    rows, vocab = 256, 151936
    size = rows * vocab * 4

    def per_row(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    def logits() -> torch.Tensor:
        return randn(rows, vocab, dtype=torch.float32)

    seen = torch.zeros(rows, vocab, dtype=torch.bool, device="cuda")
    counts = torch.zeros(rows, vocab, dtype=torch.int32, device="cuda")
    bitmask = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32, device="cuda")
    bias_ids = torch.randint(0, vocab, (rows, 64), device="cuda").int()
    longs = torch.arange(rows, device="cuda")
    uniforms = torch.rand(rows, device="cuda")
    penalties = per_row(0.1), per_row(0.1), per_row(1.1)
    yield Case(name="apply_penalties", bytes=2 * size + 5 * rows * vocab, inputs=[(logits(),)],
               run=lambda x: kernels.apply_penalties(x, seen, counts, *penalties))  # fmt: skip
    yield Case(name="apply_bitmask", bytes=bitmask.nbytes, inputs=[(logits(),)],
               run=lambda x: kernels.apply_bitmask(x, bitmask))  # fmt: skip
    yield Case(name="apply_logit_bias", bytes=rows * 64 * 16, inputs=[(logits(),)],
               run=lambda x: kernels.apply_logit_bias(x, bias_ids, bias_ids.float()))  # fmt: skip
    yield Case(name="draw_uniform", bytes=rows * 28, inputs=[(longs, longs, longs)], run=kernels.draw_uniform)
    for name, heat, k, p in (
        ("greedy", 0.0, 0, 1.0),
        ("plain", 1.0, 0, 1.0),
        ("top_k", 1.0, 50, 1.0),
        ("top_p", 1.0, 0, 0.9),
    ):
        parameters = per_row(heat), per_row(k, torch.int32), per_row(p), per_row(0.0)
        yield Case(name=f"sample_tokens {name} [{rows}, {vocab}]", bytes=size, inputs=[(logits(),), (logits(),)],
                   run=lambda x, p=parameters: kernels.sample_tokens(x, uniforms, *p))  # fmt: skip
    yield Case(name="token_logprobs 20", bytes=size, inputs=[(logits(),), (logits(),)],
               run=lambda x: kernels.token_logprobs(x, longs, 20))  # fmt: skip


THEMES: dict[str, Callable[[], Iterator[Case]]] = {
    "elementwise": elementwise,
    "decode": decode_attention,
    "prefill": prefill_attention,
    "products": products,
    "experts": experts,
    "sampling": sampling,
}
