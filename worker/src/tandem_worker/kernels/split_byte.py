"""Weights of bfloat16 in 12 bits, bit for bit: how they lie for a GPU, made and read back in plain torch.

A bfloat16 is a sign, eight bits of exponent and seven of mantissa. Its low byte stays as it is. Its high byte without
the sign, seven of the exponent's bits, has one of eight values for all but a few weights of a trained matrix: three
bits, and the sign. The eight are chosen for each matrix, so exact zeros are one of them where there are many. A weight
that has none of them is *escaped*: its place in the matrix holds the first value with a low byte of zero, its own bits
are listed beside, and what reads the matrix puts them right.

Columns come in units of 64, of which column j and column j + 32 are a pair and lie together, so that a byte permutation
takes eight weights apart and two products of half a tile use them in the order in which they come out:

    low     [..., N, K / 2] int16: low bytes of a pair, of the first column in the low half
    codes   [..., N, K / 2] uint8: of four pairs that follow each other a word of eight codes and eight signs: nibbles 0
            to 3 have in bits 0 to 2 the codes of the first columns, nibbles 4 to 7 those of the second; bit 7 of byte j
            is the sign of pair j's first column, bit 3 of its second
    beside  int32, flat: of each matrix two words with the eight values, the first lowest; for each block of 32 rows
            where its escapes begin, counted from the matrix's own first word, and where the last one's end; behind
            those of all matrices the escapes of all, by row and column, two words each: row % 256 in the highest byte
            and column below, then the bits
"""

from __future__ import annotations

import torch

UNIT = 64
"""Columns that come in one run of pairs: K is a multiple of it."""
BLOCK = 32
"""Rows whose escapes are listed together."""
HEAD = 3
"""Words of a matrix in `beside` other than one for each block."""
MAX_COLUMNS = 1 << 24
_NUM_CODES = 8
_NUM_HIGHS = 128
_NO_CODE = 255
_AT_ONCE = 1 << 22
"""Weights that are taken at a time."""
_LEAST_GAIN = 5
"""One in so many bytes must be saved."""

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def num_blocks(rows: int) -> int:
    """Blocks of `BLOCK` rows."""
    return -(-rows // BLOCK)


def encode(values: torch.Tensor) -> Parts | None:
    """`[..., N, K]` of bfloat16, or of float32 that has no more bits, as `low`, `codes` and `beside`.

    None where that is not a fifth smaller than bfloat16, where K is no multiple of `UNIT` or too large, and for other
    values. On the tensor's device, in strips: some MiB beyond the result.
    """
    *lead, rows, columns = values.shape
    if values.numel() == 0 or columns % UNIT or columns >= MAX_COLUMNS or len(lead) > 1:
        return None
    matrices = values.reshape(-1, rows, columns)
    counts = [count for count in map(_count, matrices) if count is not None]
    if len(counts) < len(matrices):
        return None
    tables = [_choose(count) for count in counts]
    escapes = sum(int(count.sum() - count[table].sum()) for count, table in zip(counts, tables, strict=True))
    words = len(matrices) * (num_blocks(rows) + HEAD) + 2 * escapes
    if _LEAST_GAIN * (3 * values.numel() // 2 + 4 * words) > (_LEAST_GAIN - 1) * 2 * values.numel() or words >= 1 << 31:
        return None
    low = torch.empty((*lead, rows, columns // 2), dtype=torch.int16, device=values.device)
    codes = torch.empty((*lead, rows, columns // 2), dtype=torch.uint8, device=values.device)
    heads, lists = [], []
    at = len(matrices) * (num_blocks(rows) + HEAD)
    places = zip(matrices, tables, low.view(-1, *low.shape[-2:]), codes.view(-1, *codes.shape[-2:]), strict=True)
    for matrix, table, own_low, own_codes in places:
        listed = _encode_matrix(matrix, table, own_low, own_codes)
        heads.append(_head(table, listed[:, 2], num_blocks(rows), at))
        lists.append(listed[:, :2].flatten())
        at += 2 * len(listed) - num_blocks(rows) - HEAD
    return low, codes, torch.cat([torch.cat(heads), *lists]).to(torch.int32)


def decode(parts: Parts) -> torch.Tensor:
    """`[..., N, K]` bfloat16, of the bits that were encoded."""
    low, codes, beside = parts
    *lead, rows, half = low.shape
    values = torch.empty((*lead, rows, 2 * half), dtype=torch.bfloat16, device=low.device)
    bits = values.view(torch.int16).view(-1, rows, 2 * half)
    own = zip(low.view(-1, rows, half), codes.view(-1, rows, half), strict=True)
    for index, (own_low, own_codes) in enumerate(own):
        words = beside[index * (num_blocks(rows) + HEAD) :]
        head = words[: num_blocks(rows) + HEAD]
        table = head[:2].contiguous().view(torch.uint8).to(torch.int32)
        for start, stop in _strips(rows, 2 * half):
            bits[index, start:stop] = _decode_rows(own_low[start:stop], own_codes[start:stop], table)
        first, last = int(head[2]), int(head[-1])
        places, true = words[first:last].view(-1, 2).long().unbind(1)
        # The block of each escape says which of the rows with that rest it is.
        number = torch.arange(first, last, 2, device=low.device)
        blocks = torch.searchsorted(head[2:].long(), number, right=True) - 1
        row = blocks * BLOCK + (places >> 24) % BLOCK
        bits[index, row, places & (MAX_COLUMNS - 1)] = true.to(torch.int16)
    return values


def _strips(rows: int, columns: int) -> list[tuple[int, int]]:
    step = max(1, _AT_ONCE // columns)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _bits(values: torch.Tensor) -> torch.Tensor | None:
    """16 bits of each, int32; None where they have more."""
    if values.dtype == torch.bfloat16:
        return values.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    if values.dtype != torch.float32:
        return None
    words = values.contiguous().view(torch.int32)
    return None if bool((words & 0xFFFF).any()) else words >> 16 & 0xFFFF


def _count(matrix: torch.Tensor) -> torch.Tensor | None:
    """How many weights have each value of the high byte without its sign, `[128]`; None for other values."""
    counts = torch.zeros(_NUM_HIGHS, dtype=torch.int64, device=matrix.device)
    for start, stop in _strips(*matrix.shape):
        bits = _bits(matrix[start:stop])
        if bits is None:
            return None
        counts += torch.bincount((bits >> 8 & 127).flatten(), minlength=_NUM_HIGHS)
    return counts.cpu()


def _choose(counts: torch.Tensor) -> torch.Tensor:
    """The eight most frequent values, of equally many the lowest, `[8]`, lowest first."""
    return counts.argsort(descending=True, stable=True)[:_NUM_CODES].sort().values


def _head(table: torch.Tensor, rows: torch.Tensor, blocks: int, at: int) -> torch.Tensor:
    """What `beside` has of a matrix before its escapes, which are in these `rows` and begin at word `at`."""
    words = table.to(torch.uint8).view(torch.int32).to(rows.device)
    edges = torch.arange(blocks + 1, device=rows.device) * BLOCK
    return torch.cat([words.long(), at + 2 * torch.searchsorted(rows.contiguous(), edges)])


def _encode_matrix(matrix: torch.Tensor, table: torch.Tensor, low: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Fill `low` and `codes`; the escapes `[E, 3]`: place, bits, row."""
    numbers = torch.full((_NUM_HIGHS,), _NO_CODE, dtype=torch.int32, device=matrix.device)
    numbers[table.to(matrix.device)] = torch.arange(_NUM_CODES, dtype=torch.int32, device=matrix.device)
    listed = []
    for start, stop in _strips(*matrix.shape):
        bits = _bits(matrix[start:stop])
        assert bits is not None
        code = numbers[bits >> 8 & 127]
        escaped = code == _NO_CODE
        row, column = escaped.nonzero(as_tuple=True)
        place = (row + start) % 256 << 24 | column
        place = torch.where(place >= 1 << 31, place - (1 << 32), place)
        listed.append(torch.stack((place, bits[row, column].long(), row + start), 1))
        kept = bits.masked_fill(escaped, 0)
        code = code.masked_fill(escaped, 0)
        _encode_rows(kept, code, low[start:stop], codes[start:stop])
    return torch.cat(listed)


def _encode_rows(bits: torch.Tensor, code: torch.Tensor, low: torch.Tensor, codes: torch.Tensor) -> None:
    first, second = (bits & 255).unflatten(-1, (-1, 2, UNIT // 2)).unbind(-2)
    low.copy_((first | second << 8).flatten(-2))
    a, b = code.unflatten(-1, (-1, 2, UNIT // 2)).unbind(-2)
    sign_a, sign_b = (bits >> 15).unflatten(-1, (-1, 2, UNIT // 2)).unbind(-2)
    signs = (sign_a << 7 | sign_b << 3).flatten(-2)
    # Four pairs: first columns' codes in the nibbles of bytes 0 and 1, second columns' in those of bytes 2 and 3.
    a, b = a.flatten(-2).unflatten(-1, (-1, 2, 2)), b.flatten(-2).unflatten(-1, (-1, 2, 2))
    both = torch.cat((a, b), -2)
    codes.copy_((both[..., 0] | both[..., 1] << 4).flatten(-2) | signs)


def _decode_rows(low: torch.Tensor, codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """`[n, K]` int16, escapes not put right."""
    word, pairs = codes.to(torch.int32), low.to(torch.int32) & 0xFFFF
    nibbles = torch.stack((word & 7, word >> 4 & 7), -1).flatten(-2).unflatten(-1, (-1, 2, 4))
    a, b = (nibbles[..., side, :].flatten(-2) for side in (0, 1))
    first = (word >> 7) << 15 | table[a] << 8 | pairs & 255
    second = (word >> 3 & 1) << 15 | table[b] << 8 | pairs >> 8
    halves = (half.unflatten(-1, (-1, UNIT // 2)) for half in (first, second))
    return torch.stack(tuple(halves), -2).flatten(-3).to(torch.int16)
