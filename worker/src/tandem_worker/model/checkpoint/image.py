"""A checkpoint's files in a GPU's memory before torch is there: read at a stretch while it is imported.

Memory comes in chunks: one for each large tensor, one for several small ones that are neighbours in a file. The loader
takes tensors out of it. A large one stays where it is, and its chunk lives as long as it; of others there are copies. A
chunk is given back when nobody needs it any more, so that there is one tensor too many at a time. No torch until then.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tandem_worker.host.cuda import CudaError, Driver
from tandem_worker.model.checkpoint.carrying import MOST_READERS, Carriers, Lane, Span, WeightFile, opened
from tandem_worker.model.checkpoint.files import find_safetensors, is_packed
from tandem_worker.model.checkpoint.header import Entry

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LARGE = 8 << 20
"""Bytes of a tensor from which on it has a chunk of its own."""
SHARED = 64 << 20
"""Bytes of a chunk from which on no other tensor joins it."""
PIECE = 32 << 20
"""Bytes that are read at a stretch: imports keep the interpreter, and each piece waits for it a few times."""
_FREE_SHARE = 0.9
_CONFIG = "config.json"
_QUANTIZED = b'"quantization_config"'
_MATRICES = frozenset({"F32", "F16", "BF16"})
"""Element types of tensors that say where they lie (`Stored.place`)."""


class Memory(Protocol):
    """The device's."""

    def allocate(self, size: int) -> int:
        """The address of so many bytes. Raises CudaError."""
        ...

    def free(self, address: int) -> None:
        """Give them back."""
        ...

    def open_lane(self, size: int) -> AbstractContextManager[Lane]:
        """A way to it for pieces of so many bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A chunk to be: bytes of a file, and where in them tensors begin."""

    span: Span
    tensors: tuple[Entry, ...]


def plan_chunks(entries: Iterable[Entry], *, large: int = LARGE, shared: int = SHARED) -> Iterator[Plan]:
    """Chunks of a file, whose tensors come in the order of their data; offsets are those of the entries."""
    together: list[Entry] = []
    for entry in entries:
        if together and (entry.nbytes >= large or together[-1].stop - together[0].start >= shared):
            yield _join(together)
            together = []
        together.append(entry)
        if entry.nbytes >= large:
            yield _join(together)
            together = []
    if together:
        yield _join(together)


def is_taken(entry: Entry) -> bool:
    """Whether it is what a loader takes out of an image. What it only reads, as experts that are one tensor, would be
    in the device's memory twice."""
    return len(entry.shape) == 2 and entry.dtype in _MATRICES


def _join(entries: list[Entry]) -> Plan:
    start = entries[0].start
    return Plan(Span(start, entries[-1].stop - start), tuple(entries))


class Chunk:
    """Memory that is given back with the last reference to it."""

    def __init__(self, memory: Memory, size: int, count: Callable[[int], None]) -> None:
        self.address, self.size = memory.allocate(size), size
        self._memory, self._count = memory, count
        count(size)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._count(-self.size)
            with contextlib.suppress(CudaError):  # the process ends, or the device is lost
                self._memory.free(self.address)


@dataclass(frozen=True, slots=True)
class _Place:
    chunk: Chunk
    entry: Entry
    offset: int
    is_alone: bool


class _Bytes:
    """Memory as torch, among others, takes it over without a copy."""

    def __init__(self, place: _Place) -> None:
        self._chunk = place.chunk
        self.__cuda_array_interface__ = {
            "shape": (place.entry.nbytes,), "typestr": "|u1", "data": (place.chunk.address + place.offset, False),
            "strides": None, "version": 3,
        }  # fmt: skip


class Image:
    """What is in the device's memory of a checkpoint's files."""

    def __init__(self, memory: Memory, wrap: Callable[[Any], torch.Tensor] | None = None) -> None:
        """`wrap` makes a tensor of bytes of what has `__cuda_array_interface__`, and keeps it."""
        self._memory, self._wrap = memory, wrap or _wrap
        self._places: dict[tuple[Path, str], _Place] = {}
        self.num_bytes = 0
        """Held now, by what was taken too."""

    def read(self, files: Iterable[WeightFile], carriers: Carriers, **sizes: int) -> None:
        """Fill it; returns when all is there. Raises StartupError where a file cannot be read, and CudaError."""
        for file in files:
            assert file.header is not None
            for plan in plan_chunks(file.header.entries, **sizes):
                if not plan.span.size or not any(map(is_taken, plan.tensors)):
                    continue
                chunk = Chunk(self._memory, plan.span.size, self._count)
                for entry in plan.tensors:
                    offset = entry.start - plan.span.start
                    self._places[file.path, entry.name] = _Place(chunk, entry, offset, len(plan.tensors) == 1)
                carriers.carry(file, Span(file.first + plan.span.start, plan.span.size), chunk.address)
        carriers.settle()

    def take(self, place: tuple[Path, str], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The tensor of a file, of that type and shape, on the device; None where it is not here, or no more: each is
        handed out once."""
        found = self._places.get(place)
        if found is None or found.offset % dtype.itemsize or found.entry.shape != shape:
            return None
        if dtype.itemsize * math.prod(shape) != found.entry.nbytes:
            return None
        del self._places[place]
        tensor = self._wrap(_Bytes(found)).view(dtype).view(shape)
        return tensor if found.is_alone else tensor.clone()

    def close(self) -> None:
        """Give back what was not taken."""
        self._places.clear()

    def _count(self, size: int) -> None:
        self.num_bytes += size


def _wrap(content: Any) -> torch.Tensor:
    import torch

    return torch.as_tensor(content, device="cuda")


def read_image(path: Path, num_threads: int) -> Image | None:
    """The checkpoint in the folder `path` on GPU 0, whose context is open from then on. None where there is no GPU, it
    has no room, or the loader would not take the tensors as they are. Raises StartupError where a file cannot be read.
    """
    try:
        driver = Driver()
        files = find_plain(path)
        if not files or sum(file.stat().st_size for file in files) > _FREE_SHARE * driver.free_bytes():
            return None
        began = time.perf_counter()
        image, carriers = Image(driver), Carriers(driver.open_lane, max(1, min(MOST_READERS, num_threads)), PIECE)
        try:
            with opened(files) as sources:
                try:
                    if all(source.header is not None for source in sources):
                        image.read(sources, carriers)
                finally:
                    carriers.close()
        except BaseException:
            image.close()
            raise
    except (CudaError, OSError) as error:
        logger.warning("weights are not read before torch is there: %s", str(error))  # whose frames have some of them
        return None
    logger.info("weights are on the device", extra=carriers.describe(time.perf_counter() - began))
    return image


def find_plain(path: Path) -> list[Path]:
    """The files of a checkpoint whose tensors are loaded as they are; none where those are packed or quantized."""
    if not path.is_dir() or is_packed(path) or _QUANTIZED in (path / _CONFIG).read_bytes():
        return []
    return find_safetensors(path)
