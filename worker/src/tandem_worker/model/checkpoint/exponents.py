"""Numbers of bfloat16 for keeping: exponents by zstd, sign and mantissa as they are.

A trained matrix's exponents hold 2.6 bits each in 8, its other bits nothing that could be left out. Turned left by one
bit, a number is a byte of exponent above a byte of mantissa and sign. Numbers are taken in chunks, so that a part is
read without the rest, and several threads work at once. One piece of memory, little-endian:

    chunks     for each: a byte of mantissa and sign per number, then a zstd frame of the exponents
    lengths    32 bits for each chunk: bytes of its frame
    padding    zeros, to a multiple of 64 with what follows
    trailer    32 bytes: what kind of thing this is, its numbers, its chunks, bytes of padding

For bytes that hold no repetition few settings matter: longer and fewer matches leave them to the entropy coder, which
is faster and smaller than zstd's levels are.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

CHUNK = 1 << 20
"""Numbers of a chunk; the last one has fewer."""
_MAGIC = b"TEXPON01"
_TRAILER = struct.Struct("<8sQQI4x")
_LENGTH = 4
_ALIGNMENT = 64
_IN_CACHE = 1 << 15
"""Numbers that are taken apart at a time: what is between the steps stays in the core's cache."""
_SETTINGS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=20,
    write_content_size=True, write_checksum=False,
)  # fmt: skip

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]


class ExponentsError(ValueError):
    """These bytes are no packed numbers. The message says why."""


def num_chunks(count: int) -> int:
    """Chunks of so many numbers."""
    return -(-count // CHUNK)


def pack_chunk(words: Words) -> tuple[Bytes, bytes]:
    """Bytes of mantissa and sign, and the frame of exponents, of at most `CHUNK` numbers."""
    low, exponents = np.empty(len(words), np.uint8), np.empty(len(words), np.uint8)
    turned, carried = np.empty((2, min(len(words), _IN_CACHE)), np.uint16)
    for start in range(0, len(words), _IN_CACHE):
        part = words[start : start + _IN_CACHE]
        whole, sign = turned[: len(part)], carried[: len(part)]
        np.left_shift(part, 1, out=whole)
        np.right_shift(part, 15, out=sign)
        whole |= sign
        low[start : start + len(part)] = whole
        whole >>= 8
        exponents[start : start + len(part)] = whole
    return low, zstandard.ZstdCompressor(compression_params=_SETTINGS).compress(exponents.data)


def _join(low: Bytes, exponents: Bytes, out: Words) -> None:
    carried = np.empty(min(len(out), _IN_CACHE), np.uint16)
    for start in range(0, len(out), _IN_CACHE):
        whole = out[start : start + _IN_CACHE]
        rest = carried[: len(whole)]
        whole[:] = exponents[start : start + len(whole)]
        whole <<= 8
        rest[:] = low[start : start + len(whole)]
        whole |= rest
        np.left_shift(whole, 15, out=rest)
        whole >>= 1
        whole |= rest


def pack_numbers(words: Words, threads: int | None = None) -> Iterator[memoryview]:
    """The pieces that follow each other of what `words` become. Holds a few chunks for each thread."""
    lengths, size = [], 0
    workers = threads or count_threads()
    with ThreadPoolExecutor(workers) as pool:
        step = CHUNK * 2 * workers
        for first in range(0, len(words), step):
            starts = range(first, min(first + step, len(words)), CHUNK)
            for low, frame in pool.map(lambda start: pack_chunk(words[start : start + CHUNK]), starts):
                lengths.append(len(frame))
                size += len(low) + len(frame)
                yield low.data
                yield memoryview(frame)
    tail = np.array(lengths, "<u4").tobytes()
    padding = -(size + len(tail) + _TRAILER.size) % _ALIGNMENT
    yield memoryview(tail + bytes(padding) + _TRAILER.pack(_MAGIC, len(words), len(lengths), padding))


def count_threads() -> int:
    """Threads for what is done chunk by chunk."""
    return min(len(os.sched_getaffinity(0)), 8)


@dataclass(frozen=True, slots=True, eq=False)
class PackedNumbers:
    """`count` numbers, still packed in the file's memory."""

    memory: Bytes
    count: int
    offsets: npt.NDArray[np.int64]
    """`[chunks + 1]`: where each chunk begins in `memory`."""

    @classmethod
    def parse(cls, memory: Bytes, count: int) -> PackedNumbers:
        """Raises ExponentsError where `memory` is not what `count` numbers become; frames are checked when read."""
        chunks = num_chunks(count)
        least = count + chunks * _LENGTH + _TRAILER.size
        if count < 1 or len(memory) < least:
            raise ExponentsError(f"{len(memory)} bytes are too few for {count} numbers")
        magic, numbers, told, padding = _TRAILER.unpack(memory[len(memory) - _TRAILER.size :].data)
        end = len(memory) - _TRAILER.size - padding
        start = end - chunks * _LENGTH
        if (magic, numbers, told) != (_MAGIC, count, chunks) or padding >= _ALIGNMENT or start < count:
            raise ExponentsError("its trailer is another one")
        sizes = np.frombuffer(memory[start:end].tobytes(), "<u4").astype(np.int64) + CHUNK
        sizes[-1] -= chunks * CHUNK - count
        if int(sizes.sum()) != start or memory[end : end + padding].any():
            raise ExponentsError("the lengths of its chunks do not add up")
        return cls(memory, count, np.concatenate([[0], np.cumsum(sizes)]))

    def read(self, start: int, stop: int, threads: int | None = None) -> Words:
        """Numbers `start` to `stop`. Raises ExponentsError where a frame is not what it should be."""
        first, last = start // CHUNK, num_chunks(stop)
        whole = np.empty(min(last * CHUNK, self.count) - first * CHUNK, np.uint16)

        def work(chunk: int) -> None:
            at = (chunk - first) * CHUNK
            self.read_chunk(chunk, whole[at : at + CHUNK])

        workers = min(threads or count_threads(), last - first)
        if workers > 1:
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(work, range(first, last)))
        else:
            for chunk in range(first, last):
                work(chunk)
        return whole[start - first * CHUNK : stop - first * CHUNK]

    def bytes_of(self, start: int, stop: int) -> tuple[int, int]:
        """Offsets at which the chunks of numbers `start` to `stop` begin and end."""
        return int(self.offsets[start // CHUNK]), int(self.offsets[num_chunks(stop)])

    def read_chunk(self, chunk: int, out: Words) -> None:
        """A chunk's numbers to `out`, which is as long as it."""
        begin, end = self.offsets[chunk], self.offsets[chunk + 1]
        exponents = _decompress(self.memory[begin + len(out) : end].data, len(out))
        _join(self.memory[begin : begin + len(out)], exponents, out)


def _decompress(frame: memoryview, count: int) -> Bytes:
    """Nothing is allocated that is longer than `count`, whatever the frame says of itself."""
    try:
        told = zstandard.get_frame_parameters(frame)
        if told.content_size != count or told.window_size > max(count, 1 << 20) or told.dict_id:
            raise ExponentsError("a chunk of exponents has another length than it should")
        plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ExponentsError(f"a chunk of exponents cannot be read: {error}") from error
    if len(plain) != count:
        raise ExponentsError("a chunk of exponents is cut off")
    return np.frombuffer(plain, np.uint8)
