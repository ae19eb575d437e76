"""Matrices of bfloat16 in 12 bits a weight, in numpy: what `split.h` of the CPU kernels describes, byte for byte.

A packed checkpoint of the form `fixed` holds matrices so. What a file says is checked here (`SplitMatrix.parse`) before
kernels, which trust it, read it; blocks are taken out and put below each other without being decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

COLUMNS = 64
"""Rows of a matrix `[N, K]` in a block."""
GROUP = 192
"""Bytes of a block's pair of neighbours of K."""
NUM_CODES = 8
NUM_HIGHS = 128
"""Values of the high byte without its sign."""
MAGIC = b"TSPLIT22"
_HEAD = struct.Struct("<8sQQQ32x")
HEAD = _HEAD.size
IS_SPLIT = 8
"""Place of the byte in the head that says whether 12 bits a weight follow it; else the plain matrix does."""
_WEIGHTS = 2 * COLUMNS
_NO_CODE = 0xFF
_LAST = np.uint32(1 << 31)
_UNUSED = np.uint32(0x7F80_0000)
"""Bits of what is written beside that must be zero."""
_MOST_BESIDE = 1 << 31

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]


def _place_of(at: int) -> int:
    half, lane, within = at // 64, at % 64 // 16, at % 16
    return 64 * half + 8 * lane + (within if within < 8 else 24 + within)


_PLACES = np.array([_place_of(at) for at in range(_WEIGHTS)])
"""Place in a pair `[64][2]` of the weight of each byte of a group's first 128."""
_ORDER = np.argsort(_PLACES)


class SplitError(ValueError):
    """These bytes are no matrix in 12 bits a weight. The message says why."""


@dataclass(frozen=True, slots=True)
class SplitPlaces:
    """Offsets of the parts of a matrix `[rows, columns]`, in bytes."""

    rows: int
    columns: int

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows."""
        return -(-self.rows // COLUMNS)

    @property
    def pairs(self) -> int:
        """Pairs of columns."""
        return self.columns // 2

    @property
    def words(self) -> int:
        """Words of 64 flags of a block."""
        return -(-self.pairs // 64)

    @property
    def values(self) -> int:
        """Offset of the high bytes that codes stand for; groups begin behind the head."""
        return HEAD + self.blocks * self.pairs * GROUP

    @property
    def flags(self) -> int:
        """Offset of the flags."""
        return self.values + self.blocks * NUM_CODES

    @property
    def first(self) -> int:
        """Offset of the numbers of blocks' first entries beside."""
        return self.flags + self.blocks * self.words * 8

    @property
    def beside(self) -> int:
        """Offset of the entries beside."""
        return self.first + self.blocks * 4

    def size(self, num_beside: int) -> int:
        """Bytes of the whole with so many weights written beside."""
        return self.beside + 4 * num_beside


def is_worth(size: int, plain: int) -> bool:
    """Whether `size` bytes are a fifth less than `plain` bytes, and their offsets fit."""
    return size * 5 <= plain * 4 and size - HEAD < 4 * _MOST_BESIDE


def make_head(size: int, num_beside: int, *, is_split: bool = True) -> Bytes:
    """What a matrix of `size` bytes begins with."""
    return np.frombuffer(_HEAD.pack(MAGIC, is_split, size, num_beside), np.uint8).copy()


@dataclass(frozen=True, slots=True, eq=False)
class SplitMatrix:
    """The parts of a matrix `[rows, columns]`; arrays may share the file's memory and need not be contiguous."""

    rows: int
    columns: int
    groups: Bytes
    """`[blocks, pairs, 192]`."""
    values: Bytes
    """`[blocks, 8]`."""
    flags: Bytes
    """`[blocks, 8 * words]`: bits, the lowest first."""
    starts: npt.NDArray[np.int64]
    """`[blocks + 1]`: where a block's entries begin in `beside`."""
    beside: npt.NDArray[np.uint32]

    @classmethod
    def parse(cls, memory: Bytes, rows: int, columns: int) -> SplitMatrix:
        """The matrix that `memory` holds, and nothing but zeros behind it. Raises SplitError for anything else.

        Every number of it is checked, so that kernels may go through it without looking.
        """
        if rows < 1 or columns < 2 or columns % 2:
            raise SplitError(f"{rows} x {columns} is no shape of it")
        places = SplitPlaces(rows, columns)
        if len(memory) < places.beside:
            raise SplitError(f"{len(memory)} bytes are too few for {rows} x {columns}")
        magic, is_split, size, num_beside = _HEAD.unpack(memory[:HEAD].data)
        if magic != MAGIC or is_split != 1 or memory[32:HEAD].any():
            raise SplitError("its head is another one")
        if size != places.size(num_beside) or not size <= len(memory) < size + 64 or memory[size:].any():
            raise SplitError(f"its head says {size} bytes and {num_beside} weights written beside")
        first = memory[places.first : places.beside].view("<u4")
        matrix = cls(
            rows,
            columns,
            groups=memory[HEAD : places.values].reshape(places.blocks, places.pairs, GROUP),
            values=memory[places.values : places.flags].reshape(places.blocks, NUM_CODES),
            flags=memory[places.flags : places.first].reshape(places.blocks, 8 * places.words),
            starts=np.append(first.astype(np.int64), num_beside),
            beside=memory[places.beside : size].view("<u4"),
        )
        matrix._check()
        return matrix

    def _check(self) -> None:
        counts = np.diff(self.starts)
        if self.starts[0] != 0 or (counts < 0).any():
            raise SplitError("blocks' lists of what is written beside do not follow each other")
        if (self.beside & _UNUSED).any():
            raise SplitError("something is written beside for a place that no pair has")
        flagged = self._flagged()
        if flagged[:, self.columns // 2 :].any():
            raise SplitError("it flags pairs that it does not have")
        ends = np.concatenate([[0], np.cumsum(self.beside >= _LAST)])
        if (np.diff(ends[self.starts]) != flagged.sum(1)).any():
            raise SplitError("flags and what is written beside do not agree")
        last = self.starts[1:][counts > 0] - 1
        if (self.beside[last] < _LAST).any():
            raise SplitError("a block's list of what is written beside does not end")
        if (self.values >= NUM_HIGHS).any():
            raise SplitError("a code stands for no high byte")

    def _flagged(self) -> Bytes:
        return np.unpackbits(self.flags, axis=1, bitorder="little")

    @property
    def nbytes(self) -> int:
        """Bytes that `write` writes."""
        return SplitPlaces(self.rows, self.columns).size(len(self.beside))

    def take_rows(self, start: int, stop: int) -> SplitMatrix | None:
        """Those rows; None where they are not whole blocks."""
        if start % COLUMNS or (stop % COLUMNS and stop != self.rows) or stop <= start:
            return None
        return self.blocks(start // COLUMNS, -(-stop // COLUMNS))

    def blocks(self, start: int, stop: int) -> SplitMatrix:
        """The rows of those blocks."""
        low, high = self.starts[start], self.starts[stop]
        return SplitMatrix(
            min(stop * COLUMNS, self.rows) - start * COLUMNS, self.columns, self.groups[start:stop],
            self.values[start:stop], self.flags[start:stop], self.starts[start : stop + 1] - low, self.beside[low:high],
        )  # fmt: skip

    def take_columns(self, start: int, stop: int) -> SplitMatrix | None:
        """Those columns; None where pairs would be cut in two."""
        if start % 2 or stop % 2 or stop <= start:
            return None
        pairs = slice(start // 2, stop // 2)
        flagged = self._flagged()
        block, pair = self._where(flagged)
        kept = (pair >= pairs.start) & (pair < pairs.stop)
        num_blocks = len(self.groups)
        starts = np.concatenate([[0], np.cumsum(np.bincount(block[kept], minlength=num_blocks))])
        places = SplitPlaces(self.rows, stop - start)
        cut = np.zeros((num_blocks, 64 * places.words), np.uint8)
        cut[:, : places.pairs] = flagged[:, pairs]
        return SplitMatrix(
            self.rows, stop - start, self.groups[:, pairs], self.values, np.packbits(cut, axis=1, bitorder="little"),
            starts, self.beside[kept],
        )  # fmt: skip

    def _where(self, flagged: Bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Block and pair of each entry of `beside`."""
        blocks, pairs = np.nonzero(flagged)
        last = self.beside >= _LAST
        number = np.cumsum(last) - last
        return blocks[number], pairs[number]

    def write(self, memory: Bytes) -> None:
        """The matrix to contiguous `memory` of `nbytes`."""
        places = SplitPlaces(self.rows, self.columns)
        memory[:HEAD] = make_head(self.nbytes, len(self.beside))
        memory[HEAD : places.values].reshape(self.groups.shape)[:] = self.groups
        memory[places.values : places.flags].reshape(self.values.shape)[:] = self.values
        memory[places.flags : places.first].reshape(self.flags.shape)[:] = self.flags
        memory[places.first : places.beside].view("<u4")[:] = self.starts[:-1]
        memory[places.beside :].view("<u4")[:] = self.beside

    def decode(self) -> Words:
        """The bits of all weights, `[rows, columns]`."""
        num_blocks, num_pairs = self.groups.shape[:2]
        codes = self.groups[:, :, 128:]
        nibbles = np.concatenate([codes & 15, codes >> 4], axis=2)
        signed = np.concatenate([self.values, self.values | 128], axis=1)
        high = np.take_along_axis(signed, nibbles.reshape(num_blocks, -1), axis=1).reshape(nibbles.shape)
        words = (high.astype(np.uint16) << 8 | self.groups[:, :, :128])[:, :, _ORDER]
        block, pair = self._where(self._flagged())
        words[block, pair, (self.beside >> 16 & 127).astype(np.int64)] = self.beside.astype(np.uint16)
        rows = words.reshape(num_blocks, num_pairs, COLUMNS, 2).transpose(0, 2, 1, 3)
        return rows.reshape(num_blocks * COLUMNS, self.columns)[: self.rows].astype(np.uint16, copy=False)


def join(parts: Sequence[SplitMatrix]) -> SplitMatrix | None:
    """The matrices below each other; None where one that others follow does not end with a block, or widths differ."""
    first = parts[0]
    if any(part.rows % COLUMNS for part in parts[:-1]) or any(part.columns != first.columns for part in parts):
        return None
    if len(parts) == 1:
        return first
    lengths = np.cumsum([0, *(len(part.beside) for part in parts)])
    starts = [part.starts[:-1] + before for part, before in zip(parts, lengths, strict=False)]
    return SplitMatrix(
        sum(part.rows for part in parts),
        first.columns,
        groups=np.concatenate([part.groups for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        flags=np.concatenate([part.flags for part in parts]),
        starts=np.append(np.concatenate(starts), lengths[-1]),
        beside=np.concatenate([part.beside for part in parts]),
    )


def count_highs(bits: Words) -> npt.NDArray[np.int64]:
    """How many weights of `bits` `[N, K]`, its last block padded with zeros, have each value of the high byte."""
    high = (bits >> 8).astype(np.uint8) & (NUM_HIGHS - 1)
    counts = np.bincount(high.reshape(-1), minlength=NUM_HIGHS).astype(np.int64)
    counts[0] += -bits.shape[0] % COLUMNS * bits.shape[1]
    return counts


def choose_values(counts: npt.NDArray[np.int64]) -> tuple[Bytes, int]:
    """The eight most frequent values, of equally many the lowest, and how many weights have none of them."""
    values = np.argsort(-counts, kind="stable")[:NUM_CODES].astype(np.uint8)
    return values, int(counts.sum() - counts[values].sum())


def encode(bits: Words, values: Bytes) -> SplitMatrix:
    """`bits` `[N, K]`, K even, with codes for `values`."""
    rows, columns = bits.shape
    places = SplitPlaces(rows, columns)
    padded = np.zeros((places.blocks * COLUMNS, columns), np.uint16)
    padded[:rows] = bits
    pairs = padded.reshape(places.blocks, COLUMNS, places.pairs, 2).transpose(0, 2, 1, 3).reshape(-1, _WEIGHTS)
    placed = pairs[:, _PLACES]
    high = (placed >> 8).astype(np.uint8)
    table = np.full(256, _NO_CODE, np.uint8)
    table[values] = table[values | 128] = np.arange(NUM_CODES)
    codes = table[high]
    pair, at = np.nonzero(codes == _NO_CODE)
    beside = (_PLACES[at].astype(np.uint32) << 16) | placed[pair, at]
    flagged = np.zeros((places.blocks, 64 * places.words), np.uint8)
    flagged[pair // places.pairs, pair % places.pairs] = 1
    beside[np.flatnonzero(np.append(pair[1:] != pair[:-1], True)[: len(pair)])] |= _LAST
    nibbles = (codes & 7) | (high >> 4 & 8)
    both = nibbles[:, :64] | nibbles[:, 64:] << 4
    groups = np.concatenate([placed.astype(np.uint8), both.astype(np.uint8)], axis=1)
    starts = np.searchsorted(pair // places.pairs, np.arange(places.blocks + 1))
    return SplitMatrix(
        rows, columns, groups.reshape(places.blocks, places.pairs, GROUP), np.tile(values, (places.blocks, 1)),
        np.packbits(flagged, axis=1, bitorder="little"), starts, beside.astype(np.uint32),
    )  # fmt: skip
