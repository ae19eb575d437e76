"""Decode attention over paged KV with grouped query heads: a sequence's newest token and the guesses behind it, the
context split over the device.

Bound by memory: every key and value is read once for a tile of queries. The heads of a group share one, and so do as
many tokens of a sequence as it has room for, so a key is read once per KV head and not once per query head.
Flash-Decoding's split over the context gives a lone sequence several programs.

What there is to read is listed on the device first, once for all layers that see the same keys: a tile of a sequence's
tokens and a piece of its context each. Nobody on the host knows the list's length: more programs than most steps need
take a piece each, and a few go through what is left. So a captured CUDA graph serves all lengths that fit its block
table at about the cost of those that there are, and every way in which its tokens may belong to sequences. On an H200 a
recorded step of 256 short contexts takes 10.7 ms so, and took 25 with a program for each piece that tables have room
for; contexts that fill their tables take 4 to 10% longer (354 us for 322 at 32 x 8,192).

A row has the same bits decoded, among guesses, alone and in company: the tile's shape is one for all, a row's cuts
follow from its own context, and keys that only other rows of the tile see change nothing of it (weights of exactly 0,
decays of exactly 1).
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention_checks import LOG2E, cdiv, check_paged_inputs, first_visible, online_softmax
from .checks import INDEXES, require_dtype, require_rows, require_same_device, require_shape, result_like
from .dispatch import FUSED_MATH, with_twin
from .reference.attention import paged_decode_attention_reference
from .split_merge import merge_splits, num_multiprocessors, plan_splits, tiles_of_split

WorkLists = dict[tuple[int, ...], torch.Tensor]
"""What there is to read in a step, listed on the device, by what decides it."""
_AT_FIRST = 64
"""Programs for each multiprocessor that have one piece each, or none: that is faster than going through several, and
more than most steps need. What is left is gone through by as many as find room."""
_AT_ONCE, _REGISTERS = 3, 168
"""As many find room on a multiprocessor by what they have under way, and with so many registers for each thread."""
_LISTED_TOGETHER = 256


@triton.jit
def _find_tiles(context, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key, first tile and number of tiles of rows with these contexts."""
    first = first_visible(tl.maximum(context - 1, 0), WINDOW, CHUNK)
    first_tile = first // BLOCK_N
    return first, first_tile, cdiv(tl.maximum(context, 0), BLOCK_N) - first_tile


@triton.jit
def _find_keys(
    context, taken, split, fewest_tiles, max_splits, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """First key and end of a split of each row, by its own context alone; of rows without any, the largest number and
    0."""
    first, first_tile, num_tiles = _find_tiles(context, WINDOW, CHUNK, BLOCK_N)
    tiles_per_split = tiles_of_split(num_tiles, fewest_tiles, max_splits)
    start = first_tile + split * tiles_per_split
    end = tl.minimum(start + tiles_per_split, first_tile + num_tiles)
    low = tl.maximum(first, start * BLOCK_N)
    high = tl.where(taken, tl.minimum(context, end * BLOCK_N), 0)
    return tl.where(low < high, low, 2147483647), tl.where(low < high, high, 0)


@triton.jit(do_not_specialize=["num_tokens", "num_splits", "fewest_tiles", "max_splits"])
def _list_work_kernel(
    lens_ptr, starts_ptr, sequences_ptr, work_ptr, num_tokens, num_splits, fewest_tiles, max_splits, tokens_per_tile,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    pieces_ptr = work_ptr + 4
    items_ptr = pieces_ptr + (num_tokens + 3) // 4 * 4
    count = tl.full([], 0, tl.int32)
    for start in range(0, num_tokens, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        there = tokens < num_tokens
        sequence = tl.load(sequences_ptr + tokens, mask=there, other=0).to(tl.int64)
        start_of_sequence = tl.load(starts_ptr + sequence, mask=there, other=0).to(tl.int32)
        end_of_sequence = tl.load(starts_ptr + sequence + 1, mask=there, other=0).to(tl.int32)
        length = tl.load(lens_ptr + sequence, mask=there, other=0).to(tl.int32)
        leads = there & ((tokens - start_of_sequence) % tokens_per_tile == 0)
        most = leads.to(tl.int32)  # a row of padding has its zeros from somewhere
        for ahead in range(tokens_per_tile):
            context = length - (end_of_sequence - 1 - tokens - ahead)
            _, _, num_tiles = _find_tiles(context, WINDOW, CHUNK, BLOCK_N)
            pieces = cdiv(num_tiles, tiles_of_split(num_tiles, fewest_tiles, max_splits))
            if ahead == 0:
                tl.store(pieces_ptr + tokens, pieces, mask=there)
            most = tl.where(leads & (tokens + ahead < end_of_sequence), tl.maximum(most, pieces), most)
        places = count + tl.cumsum(most, axis=0) - most
        context = length - (end_of_sequence - 1 - tokens)
        together = tl.minimum(end_of_sequence - tokens, tokens_per_tile)
        for split in range(num_splits):
            item = items_ptr + 4 * (places + split)
            taken = split < most
            tl.store(item, tokens, mask=taken)
            tl.store(item + 1, split * 64 + together, mask=taken)
            tl.store(item + 2, sequence.to(tl.int32), mask=taken)
            tl.store(item + 3, context, mask=taken)
        count += tl.sum(most, axis=0)
    tl.store(work_ptr, count)


@triton.jit
def _attend(  # noqa: PLR0915 -- a kernel's body
    index,
    q_ptr, cache_ptr, tables_ptr, work_ptr, out_ptr, partial_ptr, lse_ptr, scale_log2, num_tokens, group, num_q_heads,
    head_dim, block_size, num_splits, fewest_tiles, max_splits,
    stride_q_row, stride_q_head, stride_block, stride_kv, stride_kv_head, stride_slot, stride_table,
    stride_out_row, stride_out_head,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Piece `index` of the work: one tile of a sequence's tokens, for one KV head, over one split of its context."""
    pieces_ptr = work_ptr + 4
    items_ptr = pieces_ptr + (num_tokens + 3) // 4 * 4
    num_kv_heads = num_q_heads // group
    members = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    kv_head = index % num_kv_heads
    item_ptr = items_ptr + index // num_kv_heads * 4
    token = tl.load(item_ptr).to(tl.int64)
    packed = tl.load(item_ptr + 1)
    sequence = tl.load(item_ptr + 2).to(tl.int64)
    split = packed // 64
    tokens = token + members // group
    heads = kv_head * group + members % group
    taken = members // group < packed % 64
    valid = taken[:, None] & (dims < head_dim)[None, :]
    context = tl.load(item_ptr + 3) + members // group  # of each token, its own key included
    low, high = _find_keys(context, taken, split, fewest_tiles, max_splits, WINDOW, CHUNK, BLOCK_N)
    lowest = tl.min(low, axis=0)
    highest = tl.max(high, axis=0)

    q_ptrs = q_ptr + tokens[:, None] * stride_q_row + heads[:, None] * stride_q_head + dims[None, :]
    q = tl.load(q_ptrs, mask=valid, other=0.0)
    head_ptr = cache_ptr + kv_head.to(tl.int64) * stride_kv_head
    maximum = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    accumulated = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for tile in range(lowest // BLOCK_N, cdiv(highest, BLOCK_N)):
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        there = (keys < highest) & (keys >= lowest)
        block = tl.load(tables_ptr + sequence * stride_table + keys // block_size, mask=there, other=0).to(tl.int64)
        offsets = block * stride_block + (keys % block_size) * stride_slot
        kv_ptrs = head_ptr + offsets[:, None] + dims[None, :]
        kv_mask = there[:, None] & (dims < head_dim)[None, :]
        k = tl.load(kv_ptrs, mask=kv_mask, other=0.0)
        v = tl.load(kv_ptrs + stride_kv, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        seen = (keys[None, :] < high[:, None]) & (keys[None, :] >= low[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        weights, decay, maximum, total = online_softmax(scores, maximum, total)
        accumulated = accumulated * decay[:, None]
        accumulated = tl.dot(weights.to(v.dtype), v, accumulated, input_precision="ieee")

    divisor = tl.where(total > 0.0, total, 1.0)
    y = accumulated / divisor[:, None]
    pieces = tl.load(pieces_ptr + tokens, mask=taken, other=0)
    met = taken & (split < pieces)
    if HAS_SINKS:
        whole = taken & (pieces < 0)  # sinks join where pieces meet, and be it one
    else:
        whole = taken & (members * 0 + split == 0) & (pieces <= 1)
        met = met & (pieces > 1)
    slot = (tokens * num_q_heads + heads) * num_splits + split
    tl.store(lse_ptr + slot, maximum + tl.log2(divisor), mask=met)
    tl.store(partial_ptr + slot[:, None] * head_dim + dims[None, :], y, mask=valid & met[:, None])
    out_ptrs = out_ptr + tokens[:, None] * stride_out_row + heads[:, None] * stride_out_head + dims[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=valid & whole[:, None])


@triton.jit(do_not_specialize=["first", "num_tokens", "num_splits", "fewest_tiles", "max_splits", "stride_table"])
def _paged_decode_attention_kernel(
    first,
    q_ptr, cache_ptr, tables_ptr, work_ptr, out_ptr, partial_ptr, lse_ptr, scale_log2, num_tokens, group, num_q_heads,
    head_dim, block_size, num_splits, fewest_tiles, max_splits,
    stride_q_row, stride_q_head, stride_block, stride_kv, stride_kv_head, stride_slot, stride_table,
    stride_out_row, stride_out_head,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    num_items = tl.load(work_ptr) * (num_q_heads // group)
    if REST:
        for index in range(first + tl.program_id(0), num_items, tl.num_programs(0)):
            _attend(
                index, q_ptr, cache_ptr, tables_ptr, work_ptr, out_ptr, partial_ptr, lse_ptr, scale_log2, num_tokens,
                group, num_q_heads, head_dim, block_size, num_splits, fewest_tiles, max_splits, stride_q_row,
                stride_q_head, stride_block, stride_kv, stride_kv_head, stride_slot, stride_table, stride_out_row,
                stride_out_head,
                WINDOW, CHUNK, HAS_SINKS, BLOCK_G, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    else:
        index = tl.program_id(0)
        if index >= num_items:
            return
        _attend(
            index, q_ptr, cache_ptr, tables_ptr, work_ptr, out_ptr, partial_ptr, lse_ptr, scale_log2, num_tokens,
            group, num_q_heads, head_dim, block_size, num_splits, fewest_tiles, max_splits, stride_q_row, stride_q_head,
            stride_block, stride_kv, stride_kv_head, stride_slot, stride_table, stride_out_row, stride_out_head,
            WINDOW, CHUNK, HAS_SINKS, BLOCK_G, BLOCK_N, BLOCK_D,
        )  # fmt: skip


def _keys_per_tile(block_d: int, element_size: int) -> int:
    """Keys per tile. Loads through the block table take two of Triton's stages each: five stages keep two tiles of keys
    and values under way, and larger tiles would not fit that often.
    """
    return max(16, min(128, 16384 // (block_d * element_size)))


@with_twin(paged_decode_attention_reference)
def paged_decode_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor | None = None,
    sequence_ids: torch.Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    work: WorkLists | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's last few tokens over its paged context, their own keys included.

    q `[T, Hq, D]` bf16, fp16 or fp32; kv_cache `[N, 2, Hk, S, D]` of q's dtype, any strides with D contiguous;
    block_tables `[B, M]` int32; context_lens `[B]` int32 or int64, new tokens included, 0 for padding rows, which come
    back as zeros; query_start `[B + 1]` int32 or int64, each sequence's first token in T; sequence_ids `[T]` int32 or
    int64, the sequence of each token; without those two each sequence has one token. scale usually D ** -0.5; `window`
    counts the keys a query sees, its own included; `chunk` is Llama 4's chunk length; sinks `[Hq]` are gpt-oss's extra
    logits. -> `[T, Hq, D]`. `num_splits` divides every context among so many. `work` keeps what is listed on the device
    for the other layers of the same step. Of long chunks of a prompt `paged_prefill_attention` reads the keys less
    often.
    Raises `ValueError` for shapes, strides and ranges, `TypeError` for dtypes and devices.
    Method: FlashAttention-2 (Dao, 2023) with Flash-Decoding's split over the context.
    """
    group = check_paged_inputs(q, kv_cache, block_tables, context_lens, sinks, window, chunk)
    query_start, sequence_ids = _describe_rows(q, block_tables.shape[0], query_start, sequence_ids)
    out = result_like("out", out, tuple(q.shape), q)
    num_tokens, num_q_heads, head_dim = q.shape
    if num_tokens == 0:
        return out
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_n = _keys_per_tile(block_d, q.element_size())
    longest = min(block_tables.shape[1] * kv_cache.shape[3], window or 1 << 62, chunk or 1 << 62)
    num_kv_heads = num_q_heads // group
    num_splits, *cuts = plan_splits(triton.cdiv(longest, block_n) + 1, block_n, num_splits)
    partial = torch.empty((num_tokens, num_q_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((num_tokens, num_q_heads, num_splits), dtype=torch.float32, device=q.device)
    block_g = max(16, triton.next_power_of_2(group))
    spans = {"WINDOW": window or 0, "CHUNK": chunk or 0, "BLOCK_N": block_n}
    key = (*spans.values(), block_g // group, num_splits, *cuts)
    listed = None if work is None else work.get(key)
    if listed is None:
        listed = torch.empty(8 + num_tokens * (1 + 4 * num_splits), dtype=torch.int32, device=q.device)
        _list_work_kernel[(1,)](
            context_lens, query_start, sequence_ids, listed, num_tokens, num_splits, *cuts, block_g // group,
            **spans, BLOCK_T=_LISTED_TOGETHER, num_warps=8, **FUSED_MATH,
        )  # fmt: skip
        if work is not None:
            work[key] = listed
    most, sms = num_tokens * num_splits * num_kv_heads, num_multiprocessors(q.device)
    first = min(most, int(_AT_FIRST * sms))
    for start, programs in ((0, first), (first, min(most - first, _AT_ONCE * sms))):
        if programs:
            _paged_decode_attention_kernel[(programs,)](
                start, q, kv_cache, block_tables, listed, out, partial, lse, scale * LOG2E, num_tokens, group,
                num_q_heads, head_dim, kv_cache.shape[3], num_splits, *cuts,
                q.stride(0), q.stride(1), *kv_cache.stride()[:4], block_tables.stride(0), out.stride(0), out.stride(1),
                **spans, HAS_SINKS=sinks is not None, BLOCK_G=block_g, BLOCK_D=block_d, REST=start > 0,
                num_warps=4, num_stages=5, maxnreg=_REGISTERS, **FUSED_MATH,
            )  # fmt: skip
    if num_splits > 1 or sinks is not None:
        merge_splits(partial, lse, sinks, out, pieces=listed[4 : 4 + num_tokens])
    return out


def _describe_rows(
    q: torch.Tensor, num_sequences: int, query_start: torch.Tensor | None, sequence_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences whose tokens the rows of q are: as given, or one of each sequence."""
    if query_start is None and sequence_ids is None:
        require_shape("q", q, (num_sequences, None, None))
        rows = torch.arange(num_sequences + 1, dtype=torch.int32, device=q.device)
        return rows, rows
    if query_start is None or sequence_ids is None:
        raise ValueError("query_start and sequence_ids must be given both or not at all")
    require_shape("query_start", query_start, (num_sequences + 1,))
    require_shape("sequence_ids", sequence_ids, (q.shape[0],))
    for name, index in (("query_start", query_start), ("sequence_ids", sequence_ids)):
        require_dtype(name, index, *INDEXES)
        require_rows(name, index)
    require_same_device(q, query_start=query_start, sequence_ids=sequence_ids)
    return query_start, sequence_ids
