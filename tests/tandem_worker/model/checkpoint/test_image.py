"""A checkpoint that is on the device before it is loaded: the same bits, and nothing kept that nobody needs."""

from __future__ import annotations

import ctypes
import gc
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tandem_worker.host.collector import paused_collector
from tandem_worker.host.cuda import CudaError
from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.carrying import Carriers, opened
from tandem_worker.model.checkpoint.header import Entry
from tandem_worker.model.checkpoint.image import Image, find_plain, plan_chunks, read_image
from tandem_worker.model.checkpoint.loader import Part, WeightLoader
from tandem_worker.model.checkpoint.safetensors import SafetensorsSource
from tandem_worker.model.checkpoint.stored import Slice

CPU = torch.device("cpu")


class HostLane:
    def __init__(self, size: int) -> None:
        self.buffer = memoryview(bytearray(size))

    def carry(self, address: int, size: int) -> None:
        ctypes.memmove(address, bytes(self.buffer[:size]), size)


class HostMemory:
    """A device whose memory is the host's."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.held: dict[int, Any] = {}
        self.most = 0
        self._room = room

    def allocate(self, size: int) -> int:
        if size > self._room:
            raise CudaError("CUDA error 2 in cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY")
        self._room -= size
        block = (ctypes.c_ubyte * size)()
        self.held[ctypes.addressof(block)] = block
        self.most = max(self.most, self.num_bytes)
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        self._room += len(self.held.pop(address))

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.held.values()))

    @contextmanager
    def open_lane(self, size: int) -> Iterator[HostLane]:
        yield HostLane(size)

    def wrap(self, content: Any) -> torch.Tensor:
        told = content.__cuda_array_interface__
        view = (ctypes.c_ubyte * told["shape"][0]).from_address(told["data"][0])
        view.content = content  # type: ignore[attr-defined]
        return torch.frombuffer(view, dtype=torch.uint8)


def read(memory: HostMemory, paths: list[Path], *, piece: int = 100, large: int = 200, shared: int = 500) -> Image:
    image, carriers = Image(memory, memory.wrap), Carriers(memory.open_lane, 2, piece)
    try:
        with opened(paths) as files:
            image.read(files, carriers, large=large, shared=shared)
    finally:
        carriers.close()
    return image


TYPES = st.sampled_from((torch.bfloat16, torch.float32))


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    width = draw(st.integers(1, 20))
    return {
        f"t{number}": torch.randn(draw(st.integers(1, 12)), width).to(draw(TYPES))
        for number in range(draw(st.integers(1, 8)))
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(checkpoints(), st.randoms(use_true_random=False), st.integers(1, 300), st.integers(1, 400), st.integers(1, 900))
def test_what_is_taken_is_what_is_copied(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, torch.Tensor],
    chance: random.Random,
    piece: int,
    large: int,
    shared: int,
) -> None:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file(tensors, path)
    source, memory = SafetensorsSource([path]), HostMemory()
    image = read(memory, [path], piece=piece, large=large, shared=shared)
    assert image.num_bytes == memory.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CPU, "keeps_packed": False}
    plain, loader = WeightLoader(source, **options), WeightLoader(source, **options, image=image)
    names = list(tensors)
    chance.shuffle(names)
    kept = []
    while names:
        count = chance.randint(1, 2)
        taken, names = names[:count], names[count:]
        parts = [
            Part(
                name=name,
                shape=tuple(tensors[name].shape),
                piece=chance.choice((None, Slice(0, 0, chance.randint(1, tensors[name].shape[0])))),
            )
            for name in taken
        ]
        kept.append((loader.stack(parts), plain.stack(parts)))
    for found, expected in kept:
        assert torch.equal(found, expected)
    image.close()
    assert image.num_bytes == memory.num_bytes
    del kept, found
    assert memory.num_bytes == 0


def test_a_large_tensor_stays_where_it_is_and_what_is_joined_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"t{number}": torch.randn(10, 10) for number in range(4)}, path)
    memory = HostMemory()
    image = read(memory, [path])
    loader = WeightLoader(
        SafetensorsSource([path]), dtype=torch.float32, device=CPU, keeps_packed=False, image=image
    )  # fmt: skip
    one = loader.load("t0", (10, 10))
    assert one.data_ptr() in memory.held
    two = loader.stack([Part(name=name, shape=(10, 10)) for name in ("t1", "t2")])
    assert two.data_ptr() not in memory.held
    assert memory.num_bytes == 2 * one.nbytes
    again = loader.load("t0", (10, 10))
    assert again.data_ptr() != one.data_ptr()
    image.close()
    assert memory.num_bytes == one.nbytes


def test_others_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"t": torch.randn(10, 10)}, path)
    image = read(HostMemory(), [path])
    assert image.take((path, "other"), torch.float32, (10, 10)) is None
    assert image.take((path, "t"), torch.float32, (20, 5)) is None
    assert image.take((path, "t"), torch.bfloat16, (10, 10)) is None
    assert image.take((path, "t"), torch.float32, (10, 10)) is not None


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 40), st.integers(1, 100))
def test_chunks_are_the_file(sizes: list[int], large: int, shared: int) -> None:
    entries, start = [], 0
    for number, size in enumerate(sizes):
        entries.append(Entry(str(number), "U8", (size,), start, start + size))
        start += size
    plans = list(plan_chunks(entries, large=large, shared=shared))
    assert [entry for plan in plans for entry in plan.tensors] == entries
    end = 0
    for plan in plans:
        assert plan.span.start == end
        end += plan.span.size
        assert len(plan.tensors) == 1 or all(entry.nbytes < large for entry in plan.tensors)
        assert plan.span.size < shared + large or len(plan.tensors) == 1
    assert end == start


def test_without_room_nothing_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"t{number}": torch.randn(10, 10) for number in range(4)}, path)
    memory = HostMemory(room=900)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        read(memory, [path])
    gc.collect()  # the error's frames
    assert memory.num_bytes == 0


def test_what_is_only_read_is_not_on_the_device_twice(tmp_path: Path) -> None:
    """Experts as one tensor, and what belongs to a vision tower: a loader copies the former from the file."""
    path = tmp_path / "model.safetensors"
    tensors = {"experts": torch.randn(4, 10, 10), "indexes": torch.ones(10, 20, dtype=torch.int64)}
    save_file(tensors | {"router": torch.randn(10, 10)}, path)
    memory = HostMemory()
    image = read(memory, [path])
    assert memory.num_bytes == 400
    assert image.take((path, "experts"), torch.float32, (4, 10, 10)) is None
    assert image.take((path, "router"), torch.float32, (10, 10)) is not None


class LanelessDriver(HostMemory):
    """One without pinned memory."""

    def free_bytes(self) -> int:
        return self._room

    @contextmanager
    def open_lane(self, size: int) -> Iterator[HostLane]:
        raise CudaError("CUDA error 2 in cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY")
        yield HostLane(size)


def test_a_reader_that_fails_keeps_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a cycle either: none is collected during a start, nor what is left of it ever."""
    driver = LanelessDriver()
    monkeypatch.setattr("tandem_worker.model.checkpoint.image.Driver", lambda: driver)
    (tmp_path / "config.json").write_text("{}")
    save_file({f"t{number}": torch.randn(10, 10) for number in range(4)}, tmp_path / "model.safetensors")
    with paused_collector():
        assert read_image(tmp_path, 2) is None
        assert driver.most
        assert not driver.num_bytes


def test_a_configuration_that_is_no_text_is_for_others_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    save_file({"t": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert find_plain(tmp_path)


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"t{number}": torch.randn(10, 10) for number in range(4)}, path)
    memory, content = HostMemory(), path.read_bytes()
    image, carriers = Image(memory, memory.wrap), Carriers(memory.open_lane, 2, 100)
    with opened([path]) as files:
        path.write_bytes(content[:-100])
        with pytest.raises(StartupError, match="is not a complete safetensors file"):
            image.read(files, carriers, large=200, shared=500)
    carriers.close()
    image.close()
    del carriers  # it keeps the error
    gc.collect()
    assert memory.num_bytes == 0


@pytest.mark.parametrize(
    ("config", "expected"), [({}, 1), ({"quantization_config": {"quant_method": "fp8"}}, 0)], ids=["plain", "quantized"]
)
def test_what_is_read_early(config: dict[str, Any], expected: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"t": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert len(find_plain(tmp_path)) == expected
    assert find_plain(tmp_path / "model.gguf") == []


def test_without_a_driver_the_loader_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_worker.host.cuda._LIBRARY", "libnone.so")
    assert read_image(tmp_path, 2) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path: Path) -> None:
    tensors = {
        f"t{number}": torch.randn(rows, 4096).bfloat16() for number, rows in enumerate((3000, 5, 40, 9000, 2000))
    }
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    image, device = read_image(tmp_path, 8), torch.device("cuda", 0)
    assert image is not None
    source = SafetensorsSource([tmp_path / "model.safetensors"])
    with torch.inference_mode():
        loader = WeightLoader(source, dtype=torch.bfloat16, device=device, keeps_packed=False, image=image)
        for names in (["t0"], ["t1", "t3"], ["t2"], ["t4"]):
            found = loader.stack([Part(name=name, shape=tuple(tensors[name].shape)) for name in names])
            assert torch.equal(found.cpu(), torch.cat([tensors[name] for name in names]))
        image.close()
        del found
    assert image.num_bytes == 0
