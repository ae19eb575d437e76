"""Paged decode and prefill attention over ragged batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tandem_worker import kernels
from tandem_worker.kernels import decode_attention, reference

BLOCK_SIZE = 16


@pytest.fixture
def paged(randn, generator, device):
    """A block space and the shuffled tables of sequences with given context lengths; unused blocks hold NaN."""

    def build(context_lens, num_kv_heads, head_dim, dtype, block_size=BLOCK_SIZE):
        counts = [-(-length // block_size) for length in context_lens]
        num_blocks = sum(counts) + 4
        order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        cache = randn(num_blocks, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
        tables = torch.zeros(len(context_lens), max([*counts, 1]) + 1, dtype=torch.int32)
        for row, count in enumerate(counts):
            tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        cache[order] = float("nan")
        return cache, tables.to(device), torch.tensor(context_lens, dtype=torch.int32, device=device)

    return build


OPTIONS = [{}, {"window": 20}, {"chunk": 32}, {"sinks": True}, {"window": 5, "sinks": True}]


@pytest.mark.parametrize("num_splits", [1, 3, None])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode_attention(paged, randn, wide, assert_matches, half_dtype, num_splits, options):
    cache, tables, lens = paged([1, 70, 0, 33], 2, 64, half_dtype)
    q = randn(4, 6, 64, dtype=half_dtype)
    options = {**options, "sinks": randn(6) if options.get("sinks") else None}
    expected = reference.paged_decode_attention_reference(*wide(q, cache), tables, lens, scale=0.125, **options)
    actual = kernels.paged_decode_attention(q, cache, tables, lens, scale=0.125, num_splits=num_splits, **options)
    assert_matches(actual, expected)
    assert not actual[2].any(), "a padding row is zero"


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"window": 300}], ids=str)
def test_a_row_has_the_same_bits_in_every_batch_and_table(paged, randn, half_dtype, options):
    """Beside others, alone, and with the wider block table of a recording."""
    lengths = [600, 3, 256, 257]
    cache, tables, lens = paged(lengths, 1, 32, half_dtype)
    q = randn(4, 2, 32, dtype=half_dtype)
    options = {"scale": 0.2, **options, "sinks": randn(2) if options.get("sinks") else None}
    together = kernels.paged_decode_attention(q, cache, tables, lens, **options)
    wider = torch.cat((tables, torch.zeros_like(tables)), dim=1)
    assert torch.equal(kernels.paged_decode_attention(q, cache, wider, lens, **options), together)
    for row, length in enumerate(lengths):
        own = tables[row : row + 1, : -(-length // BLOCK_SIZE)].contiguous()
        alone = kernels.paged_decode_attention(q[row : row + 1], cache, own, lens[row : row + 1], **options)
        assert torch.equal(alone[0], together[row]), f"{length} keys"


@pytest.mark.parametrize("at_first", [64, 1])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"sinks": True}], ids=str)
def test_layers_of_a_step_share_what_is_listed(paged, randn, device, half_dtype, options, at_first, monkeypatch):
    """More pieces than programs, and rows without any; the list is made once for layers that see the same keys."""
    monkeypatch.setattr(decode_attention, "_AT_FIRST", at_first if device.type == "cpu" else at_first / 64)
    lengths = [600, 0, 3, 256, 257, 1, 90] * 3
    widths = [1, 1, 2, 4, 1, 1, 5] * 3
    cache, tables, lens = paged(lengths, 2, 16, half_dtype)
    rows = describe_rows(widths, device)
    options = {"scale": 0.2, **options, "sinks": randn(4) if options.get("sinks") else None}
    work = {}
    for _ in range(2):
        q = randn(sum(widths), 4, 16, dtype=half_dtype)
        shared = kernels.paged_decode_attention(q, cache, tables, lens, *rows, work=work, **options)
        assert torch.equal(shared, kernels.paged_decode_attention(q, cache, tables, lens, *rows, **options))
        assert len(work) == 1
    kernels.paged_decode_attention(q, cache, tables, lens, *rows, work=work, scale=0.2, window=7)
    assert len(work) == 2
    listed = next(iter(work.values())).tolist()
    count, pieces, items = listed[0], listed[4 : 4 + len(q)], listed[4 + -(-len(q) // 4) * 4 :]
    assert len({tuple(items[4 * place : 4 * place + 2]) for place in range(count)}) == count
    assert count >= sum(-(-length // 256) or 1 for length in lengths) if not options.get("window") else count >= 21
    assert max(pieces) == (1 if options.get("window") else 3)


def describe_rows(widths, device):
    """`query_start` and `sequence_ids` of sequences with so many tokens each."""
    starts = torch.tensor([0, *widths]).cumsum(0).to(torch.int32)
    ids = torch.arange(len(widths), dtype=torch.int32).repeat_interleave(torch.tensor(widths))
    return starts.to(device), ids.to(device)


@pytest.mark.parametrize("options", [{"num_splits": 3}, {"window": 20}, {"chunk": 32}, {"sinks": True}], ids=str)
def test_tokens_with_guesses_behind_them(paged, randn, wide, assert_matches, device, half_dtype, options):
    """Several tiles of a sequence, part of one, all tokens that a sequence has, and a sequence without any."""
    widths = [1, 9, 5, 0, 2]
    cache, tables, lens = paged([33, 70, 5, 0, 41], 2, 64, half_dtype)
    rows = describe_rows(widths, device)
    q = randn(sum(widths), 6, 64, dtype=half_dtype)
    options = {**options, "sinks": randn(6) if options.get("sinks") else None}
    expected = reference.paged_decode_attention_reference(*wide(q, cache), tables, lens, *rows, scale=0.125, **options)
    assert_matches(kernels.paged_decode_attention(q, cache, tables, lens, *rows, scale=0.125, **options), expected)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((2, 1), {"sinks": True}), ((2, 1), {"window": 300}), ((2, 1), {"chunk": 256}), ((2, 1), {"num_splits": 3}),
        ((6, 1), {"window": 128}),
    ],
    ids=str,
)  # fmt: skip
def test_a_guess_has_the_bits_of_a_decoded_token(paged, randn, device, half_dtype, options, heads):
    """Around the ends of tiles, splits, windows and chunks; with and without others in the tile and in the step."""
    widths, lengths = [9, 1, 4], [261, 40, 515]
    cache, tables, lens = paged(lengths, heads[1], 32, half_dtype)
    starts, ids = describe_rows(widths, device)
    q = randn(sum(widths), heads[0], 32, dtype=half_dtype)
    options = {"scale": 0.2, **options, "sinks": randn(heads[0]) if options.get("sinks") else None}
    together = kernels.paged_decode_attention(q, cache, tables, lens, starts, ids, **options)
    places = torch.arange(len(q), device=device) - starts[ids.long()]
    contexts = (lens - torch.tensor(widths, device=device))[ids.long()] + places + 1
    decoded = kernels.paged_decode_attention(q, cache, tables[ids.long()], contexts.int(), **options)
    assert torch.equal(decoded, together)
    first = widths[0]
    alone = kernels.paged_decode_attention(
        q[:first], cache, tables[:1], lens[:1], *describe_rows([first], device), **options
    )
    assert torch.equal(alone, together[:first])


@pytest.mark.full
@pytest.mark.usefixtures("rows_alike")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 400)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (3, 1), (8, 2)]),
    window=st.none() | st.integers(1, 70),
    chunk=st.none() | st.integers(1, 70),
)
def test_guesses_have_the_bits_of_decoded_tokens_anywhere(paged, randn, device, rows, heads, window, chunk):
    widths, lengths = [width for width, _ in rows], [width + before for width, before in rows]
    cache, tables, lens = paged(lengths, heads[1], 16, torch.float32)
    starts, ids = describe_rows(widths, device)
    q = randn(sum(widths), heads[0], 16)
    options = {"scale": 0.2, "window": window, "chunk": chunk}
    together = kernels.paged_decode_attention(q, cache, tables, lens, starts, ids, **options)
    ends = starts[1:][ids.long()]
    contexts = lens[ids.long()] - (ends - 1 - torch.arange(len(q), device=device))
    assert torch.equal(kernels.paged_decode_attention(q, cache, tables[ids.long()], contexts, **options), together)


@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [((9, 3), 64, 16), ((4, 4), 80, 32), ((16, 1), 128, 8)])
def test_decode_attention_shapes(paged, randn, wide, assert_matches, dtype, heads, head_dim, block_size):
    cache, tables, lens = paged([37, 9], heads[1], head_dim, dtype, block_size)
    q = randn(2, heads[0], head_dim, dtype=dtype)
    expected = reference.paged_decode_attention_reference(*wide(q, cache), tables, lens, scale=0.1)
    assert_matches(kernels.paged_decode_attention(q, cache, tables, lens, scale=0.1), expected)


def test_decode_attention_reads_any_memory_order(paged, randn, wide, assert_matches):
    cache, tables, lens = paged([21], 2, 32, torch.float16)
    slot_first = cache.permute(0, 1, 3, 2, 4).contiguous().permute(0, 1, 3, 2, 4)
    q = randn(1, 3, 4, 32, dtype=torch.float16)[:, 1]
    expected = reference.paged_decode_attention_reference(*wide(q, cache), tables, lens, scale=0.2)
    assert_matches(kernels.paged_decode_attention(q, slot_first, tables, lens, scale=0.2), expected)


def run_prefill(paged, randn, wide, device, lengths, heads, head_dim, dtype, options):
    """Kernel and oracle on sequences of (new tokens, context) `lengths`, with two padding rows at the end."""
    cache, tables, lens = paged([context for _, context in lengths], heads[1], head_dim, dtype)
    starts = torch.tensor([0, *(new for new, _ in lengths)], device=device).cumsum(0).to(torch.int32)
    num_tokens = int(starts[-1])
    q = randn(num_tokens + 2, heads[0], head_dim, dtype=dtype)
    scale = head_dim**-0.5
    expected = reference.paged_prefill_attention_reference(
        *wide(q, cache), tables, starts, lens, scale=scale, **options
    )
    actual = kernels.paged_prefill_attention(q, cache, tables, starts, lens, scale=scale, **options)
    return actual[:num_tokens], expected[:num_tokens]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_prefill_attention(paged, randn, wide, assert_matches, device, half_dtype, options):
    options = {**options, "sinks": randn(6) if options.get("sinks") else None}
    lengths = [(1, 40), (20, 20), (0, 0), (17, 50), (1, 1)]
    assert_matches(*run_prefill(paged, randn, wide, device, lengths, (6, 2), 32, half_dtype, options))


@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((2, 2), 80), ((16, 1), 128)])
def test_prefill_attention_shapes(paged, randn, wide, assert_matches, device, dtype, heads, head_dim):
    assert_matches(*run_prefill(paged, randn, wide, device, [(35, 35), (3, 90)], heads, head_dim, dtype, {}))


@pytest.mark.full
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (3, 1), (8, 2)]),
    window=st.none() | st.integers(1, 70),
    chunk=st.none() | st.integers(1, 70),
)
def test_prefill_attention_over_any_ragged_batch(
    paged, randn, wide, assert_matches, device, lengths, heads, window, chunk
):
    batch = [(new, new + cached if new else 0) for new, cached in lengths] + [(1, 1)]
    options = {"window": window, "chunk": chunk}
    assert_matches(*run_prefill(paged, randn, wide, device, batch, heads, 16, torch.float32, options))


def test_attention_refuses_what_it_would_misread(paged, randn):
    cache, tables, lens = paged([5], 2, 32, torch.float32)
    with pytest.raises(ValueError, match="3 query heads cannot be grouped over 2 KV heads"):
        kernels.paged_decode_attention(randn(1, 3, 32), cache, tables, lens, scale=1.0)
    with pytest.raises(ValueError, match="window must be positive"):
        kernels.paged_decode_attention(randn(1, 2, 32), cache, tables, lens, scale=1.0, window=0)
    with pytest.raises(TypeError, match="kv_cache must be float16"):
        kernels.paged_decode_attention(randn(1, 2, 32, dtype=torch.float16), cache, tables, lens, scale=1.0)
    with pytest.raises(TypeError, match="block_tables must be int32"):
        kernels.paged_decode_attention(randn(1, 2, 32), cache, tables.long(), lens, scale=1.0)
    with pytest.raises(ValueError, match="query_start and sequence_ids must be given both"):
        kernels.paged_decode_attention(randn(1, 2, 32), cache, tables, lens, lens, scale=1.0)
    with pytest.raises(ValueError, match=r"query_start must have shape \[2\]"):
        kernels.paged_prefill_attention(randn(1, 2, 32), cache, tables, lens, lens, scale=1.0)
