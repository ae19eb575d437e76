"""Tiles of weights in 12 bits (`split_byte` has the layout): decoded in registers, and put right beside.

Every thread takes eight weights apart with eleven instructions: two masks and a shift for the codes, two byte
permutations that look up eight high bytes in a table of two registers, two more steps for the signs, and four
permutations that join high and low bytes. Triton's own operations would take about 27 a weight, so this is inline
assembly, with a plain form for the interpreter. It is not declared pure, although it is: Triton looks through pure
operations for the narrowest load and lays operands out for bytes, in words that each matrix instruction then has to
copy together (5.5 instead of 4.0 instructions per weight).

Escapes are not decoded: a tile holds the first value of the table in their place, and `add_escapes` adds true value
minus that to the sums, in the order of the list.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

DECODE: tl.constexpr = tl.constexpr("""{ .reg .b32 s, t, a, b;
    and.b32 s, $6, 0x77777777;
    prmt.b32 a, $7, $11, s;
    lop3.b32 a, a, $6, 0x80808080, 0xF8;
    shr.b32 t, s, 16;
    prmt.b32 b, $7, $11, t;
    shl.b32 t, $6, 4;
    lop3.b32 b, b, t, 0x80808080, 0xF8;
    prmt.b32 $0, $4, a, 0x5240;
    prmt.b32 $1, $5, a, 0x7260;
    prmt.b32 $2, $4, b, 0x5341;
    prmt.b32 $3, $5, b, 0x7361; }""")
"""Four pairs: $0 and $1 are their first columns, $2 and $3 their second; $4 and $5 low bytes, $6 codes, $7 and $11 the
table, which comes once for each pair."""
ESCAPES: tl.constexpr = tl.constexpr(32)
"""Escapes that are added at a time."""


@triton.jit
def widen_pairs(low, codes, table_low, table_high, ASSEMBLY: tl.constexpr):
    """Pairs `[N, H]` as bfloat16 of first columns and of second columns; H a multiple of 4."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            DECODE,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r",
            [low, codes, table_low, table_high], dtype=(tl.bfloat16, tl.bfloat16), is_pure=False, pack=4,
        )  # fmt: skip
    else:  # noqa: RET505 - Triton compiles both branches of a constexpr condition only in this form
        N: tl.constexpr = low.shape[0]
        H: tl.constexpr = low.shape[1]
        place = tl.arange(0, 4)[None, None, :]
        four = codes.to(tl.int32).reshape(N, H // 4, 4)
        word = tl.sum(four << 8 * place, axis=2)[:, :, None]  # nobody carries: it is an or
        bytes_low = low.to(tl.int32).reshape(N, H // 4, 4)
        high_a = (word >> (8 * place + 7) & 1) << 7 | _look_up(word >> 4 * place & 7, table_low, table_high)
        high_b = (word >> (8 * place + 3) & 1) << 7 | _look_up(word >> (4 * place + 16) & 7, table_low, table_high)
        a = high_a << 8 | bytes_low & 255
        b = high_b << 8 | bytes_low >> 8 & 255
        a, b = a.reshape(N, H).to(tl.int16), b.reshape(N, H).to(tl.int16)
        return a.to(tl.bfloat16, bitcast=True), b.to(tl.bfloat16, bitcast=True)


@triton.jit
def _look_up(code, table_low, table_high):
    return tl.where(code < 4, table_low, table_high) >> 8 * (code & 3) & 255


@triton.jit
def pair_columns(k_start, BLOCK_K: tl.constexpr):
    """The first columns of the pairs of a tile of BLOCK_K columns, `[BLOCK_K / 2]`; the second are 32 further."""
    pairs = tl.arange(0, BLOCK_K // 2)
    if BLOCK_K >= 64:
        return k_start + pairs // 32 * 64 + pairs % 32
    else:  # noqa: RET505 - Triton compiles both branches of a constexpr condition only in this form
        return k_start // 64 * 64 + k_start % 64 // 2 + pairs


@triton.jit
def pair_tile(
    w_ptr, codes_ptr, table_low, table_high, rows, num_rows, k_start, num_columns, stride_row,
    ASSEMBLY: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows `[N]` (int64) of a tile at column k_start: what `pair_columns` names of it, and the second columns,
    `[N, BLOCK_K / 2]` each of DTYPE. Outside there is any value."""
    pairs = k_start // 2 + tl.arange(0, BLOCK_K // 2)
    mask = (rows < num_rows)[:, None] & (pairs < num_columns // 2)[None, :]
    offsets = rows[:, None] * stride_row + pairs[None, :]
    low = tl.load(w_ptr + offsets, mask=mask, other=0)
    codes = tl.load(codes_ptr + offsets, mask=mask, other=0)
    a, b = widen_pairs(low, codes, table_low, table_high, ASSEMBLY)
    return a.to(DTYPE), b.to(DTYPE)


@triton.jit
def beside_stride(num_rows):
    """Words of `beside` from a matrix's first to that of the next."""
    return tl.cdiv(num_rows, 32) + 3


@triton.jit
def escape_range(beside_ptr, rows, num_rows):
    """Places in `beside` at which escapes of the blocks that have `rows` begin and end: fewer than 256 rows, which
    `row % 256` tells apart. The first of `rows` is one of the matrix; others may be outside, wherever that is."""
    first = tl.min(rows, axis=0)
    last = tl.max(tl.where(rows < num_rows, rows, first), axis=0)
    return tl.load(beside_ptr + 2 + first // 32), tl.load(beside_ptr + 3 + last // 32)


@triton.jit
def escape_values(beside_ptr, at, end, DTYPE: tl.constexpr):
    """The escapes from word `at` on, `[32]` each: row % 256, column, value, and whether there is one."""
    words = at + 2 * tl.arange(0, ESCAPES)
    live = words < end
    place = tl.load(beside_ptr + words, mask=live, other=0)
    bits = tl.load(beside_ptr + words + 1, mask=live, other=0)
    value = bits.to(tl.int16).to(tl.bfloat16, bitcast=True).to(DTYPE)
    return place >> 24 & 255, place & 0xFFFFFF, value, live


@triton.jit
def add_escapes(
    accumulated, x_ptr, x_offsets, x_valid, beside_ptr, begin, end, first_value, rows, k_begin, k_end,
    BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Sums `[BLOCK_M, BLOCK_N]`, in which every escape from word `begin` to `end` that is in columns [k_begin, k_end)
    counted as `first_value`."""
    for at in range(begin, end, 2 * ESCAPES):
        row, column, value, live = escape_values(beside_ptr, at, end, DTYPE)
        k = column // 64 * 64 + column % 32 * 2  # where its pair is
        live = live & (k >= k_begin) & (k < k_end)
        x_mask = x_valid[:, None] & live[None, :]
        x = tl.load(x_ptr + x_offsets[:, None] + column[None, :], mask=x_mask, other=0.0)
        mine = (row[:, None] == (rows & 255).to(tl.int32)[None, :]) & live[:, None]
        nothing = tl.zeros((ESCAPES, BLOCK_N), DTYPE)
        accumulated = tl.dot(x, tl.where(mine, value[:, None], nothing), accumulated, input_precision="ieee")
        accumulated = tl.dot(x, tl.where(mine, -first_value, nothing), accumulated, input_precision="ieee")
    return accumulated


@triton.jit
def read_table(beside_ptr, DTYPE: tl.constexpr):
    """A matrix's table as two words, and the value that stands where an escape is."""
    table_low = tl.load(beside_ptr)
    first = ((table_low & 255) << 8).to(tl.int16).to(tl.bfloat16, bitcast=True).to(DTYPE)
    return table_low, tl.load(beside_ptr + 1), first


@triton.jit
def pair_product(
    x_ptr, x_offsets, x_valid, w_ptr, codes_ptr, beside_ptr, rows, num_rows, k_begin, k_end, num_columns, stride_row,
    ASSEMBLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `weight_tiles.product`."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    table_low, table_high, first_value = read_table(beside_ptr, DTYPE)
    begin, end = escape_range(beside_ptr, rows, num_rows)  # asked for here, there at the end
    accumulated = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k_start in range(k_begin, k_end, BLOCK_K):
        columns = pair_columns(k_start, BLOCK_K)
        x_ptrs = x_ptr + x_offsets[:, None] + columns[None, :]
        x_mask = x_valid[:, None] & (columns < num_columns)[None, :]
        x_a = tl.load(x_ptrs, mask=x_mask, other=0.0)
        x_b = tl.load(x_ptrs + 32, mask=x_mask, other=0.0)
        a, b = pair_tile(
            w_ptr, codes_ptr, table_low, table_high, rows, num_rows, k_start, num_columns, stride_row,
            ASSEMBLY, BLOCK_K, DTYPE,
        )  # fmt: skip
        accumulated = tl.dot(x_a, tl.trans(a), accumulated, input_precision="ieee")
        accumulated = tl.dot(x_b, tl.trans(b), accumulated, input_precision="ieee")
    return add_escapes(
        accumulated,
        x_ptr,
        x_offsets,
        x_valid,
        beside_ptr,
        begin,
        end,
        first_value,
        rows,
        k_begin,
        k_end,
        BLOCK_N,
        DTYPE,
    )
