"""Weights that are read and copied beside the loading thread: the same bits in any pieces, and what goes wrong."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tandem_worker.host.cuda import CudaError
from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.carrying import Carriers, Span
from tandem_worker.model.checkpoint.loader import Part, WeightLoader
from tandem_worker.model.checkpoint.safetensors import SafetensorsSource
from tandem_worker.model.checkpoint.stored import Slice, Stored
from tandem_worker.model.checkpoint.upload import Uploads, find_span, open_uploads

CPU = torch.device("cpu")


class SlowLane:
    """Carries to memory of the host, after a while."""

    def __init__(self, size: int, *, broken: bool = False) -> None:
        self.buffer = memoryview(bytearray(size))
        self._broken = broken

    def carry(self, address: int, size: int) -> None:
        if self._broken:
            raise RuntimeError("the device is gone")
        time.sleep(random.random() * 1e-4)
        ctypes.memmove(address, bytes(self.buffer[:size]), size)


@contextmanager
def uploading(piece: int = 64, *, readers: int = 3, least: int = 1, broken: bool = False) -> Iterator[Uploads]:
    opened: list[SlowLane] = []

    @contextmanager
    def open_lane(size: int) -> Iterator[SlowLane]:
        lane = SlowLane(size, broken=broken)
        opened.append(lane)
        yield lane
        opened.remove(lane)

    carriers = Carriers(open_lane, readers, piece)
    with torch.inference_mode(), Uploads(carriers, settle_device=lambda: None, least=least) as uploads:
        yield uploads
    assert not opened
    assert not any(thread.is_alive() for thread in carriers.threads)


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> SafetensorsSource:
    path = folder / f"{random.getrandbits(64)}.safetensors"
    save_file(tensors, path)
    return SafetensorsSource([path])


def build_loader(
    source: SafetensorsSource, uploads: Uploads | None, dtype: torch.dtype, **options: Any
) -> WeightLoader:
    return WeightLoader(source, dtype=dtype, device=CPU, keeps_packed=False, uploads=uploads, **options)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[Part]]:
    """Matrices and what is taken of each, below each other."""
    width, dim = draw(st.integers(1, 40)), draw(st.sampled_from((None, 0, 1)))
    left = draw(st.integers(0, width - 1))
    columns = Slice(1, left, draw(st.integers(left + 1, width)))
    tensors, parts = {}, []
    for number in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 30))
        first = draw(st.integers(0, rows - 1))
        piece = {None: None, 0: Slice(0, first, draw(st.integers(first + 1, rows))), 1: columns}[dim]
        dtype = draw(st.sampled_from((torch.bfloat16, torch.bfloat16, torch.float32)))
        tensors[f"t{number}"] = torch.randn(rows, width).to(dtype)
        parts.append(Part(name=f"t{number}", shape=(rows, width), piece=piece))
    return tensors, parts


@settings(max_examples=60, deadline=None)
@given(stacks(), st.integers(1, 300), st.integers(1, 400))
def test_what_arrives_is_what_is_copied(
    tmp_path_factory: pytest.TempPathFactory,
    stack: tuple[dict[str, torch.Tensor], list[Part]],
    piece: int,
    least: int,
) -> None:
    tensors, parts = stack
    source = write(tmp_path_factory.mktemp("model"), tensors)
    for dtype in (torch.bfloat16, torch.float32):
        plain = build_loader(source, None, dtype)
        with uploading(piece, least=least) as uploads:
            loader = build_loader(source, uploads, dtype)
            whole, alone = loader.stack(parts), [loader.stack([part]) for part in parts]
        assert torch.equal(whole, plain.stack(parts))
        for part, found in zip(parts, alone, strict=True):
            assert torch.equal(found, plain.stack([part]))


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_pieces_are_the_whole(start: int, size: int, most: int) -> None:
    pieces = list(Span(start, size).cut(most))
    assert [at for piece in pieces for at in range(piece.start, piece.start + piece.size)] == list(
        range(start, start + size)
    )
    assert all(0 < piece.size <= most for piece in pieces)


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (None, Span(100, 48)),
        (Slice(0, 1, 3), Span(112, 24)),
        (Slice(0, 2, 2), Span(124, 0)),
        (Slice(1, 0, 2), None),
    ],
)
def test_what_is_taken_without_gaps(piece: Slice | None, expected: Span | None) -> None:
    assert find_span((4, 6), piece, Span(100, 48)) == expected


def test_a_tensor_is_there_when_it_is_handed_out(tmp_path: Path) -> None:
    """Whatever is done with it, through torch or past it."""
    source = write(tmp_path, {"t": torch.ones(5000, 4)})
    parts = [Part(name="t", shape=(5000, 4))] * 2
    with uploading() as uploads:
        loader = build_loader(source, uploads, torch.float32)
        for _ in range(3):
            found = loader.stack(parts)
            assert ctypes.string_at(found.data_ptr(), found.nbytes) == torch.ones(10_000, 4).numpy().tobytes()


def test_small_ones_and_other_types_are_copied_at_once(tmp_path: Path) -> None:
    source = write(tmp_path, {"small": torch.ones(3, 4), "half": torch.ones(50, 4, dtype=torch.float16)})
    with uploading(least=100) as uploads:
        loader = build_loader(source, uploads, torch.float32)
        loader.load("small", (3, 4))
        loader.load("half", (50, 4))
        assert not uploads._carriers.num_bytes


def fill_from(path: Path, stored: Stored, kept: int) -> None:
    """Of a file that is opened, and then becomes `kept` bytes long for as long as it is read."""
    content = path.read_bytes()
    with uploading() as uploads:
        uploads.fill(torch.empty(5000, 4), stored, None)
        uploads.settle()
        os.truncate(path, kept)
        try:
            uploads.fill(torch.empty(5000, 4), stored, None)
            uploads.settle()
        finally:  # what is mapped would be gone otherwise, and the process with it
            path.write_bytes(content)


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    source = write(tmp_path, {"t": torch.ones(5000, 4)})
    (path,), stored = tmp_path.iterdir(), source.stored("t")
    assert stored is not None
    with pytest.raises(StartupError, match=r"is not a complete safetensors file \(it ends at byte 70000\)") as caught:
        fill_from(path, stored, 70_000)
    assert caught.value.reason == "WeightsCorrupt"


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    source = write(tmp_path, {"t": torch.ones(50, 4)})
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(StartupError) as caught, uploading() as uploads:
        build_loader(source, uploads, torch.float32).load("t", (50, 4))
    assert caught.value.reason == "WeightsUnreadable"


def test_a_file_that_has_become_another_is_copied_the_old_way(tmp_path: Path) -> None:
    source = write(tmp_path, {"t": torch.ones(50, 4)})
    (path,) = tmp_path.iterdir()
    save_file({"t": torch.zeros(60, 4)}, tmp_path / "other")
    (tmp_path / "other").replace(path)
    with uploading() as uploads:
        found = build_loader(source, uploads, torch.float32).load("t", (50, 4))
    assert torch.equal(found, torch.ones(50, 4))


def test_a_device_that_fails_ends_the_load(tmp_path: Path) -> None:
    source = write(tmp_path, {"t": torch.ones(500, 4)})
    with pytest.raises(RuntimeError, match="the device is gone"), uploading(broken=True) as uploads:
        build_loader(source, uploads, torch.float32).load("t", (500, 4))


def test_without_pinned_memory_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are copied one after another then."""

    class Laneless:
        @contextmanager
        def open_lane(self, size: int) -> Iterator[SlowLane]:
            raise CudaError("CUDA error 2 in cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY")
            yield SlowLane(size)

    monkeypatch.setattr("tandem_worker.model.checkpoint.upload.Driver", lambda _: Laneless())
    with pytest.raises(CudaError, match="cuMemHostAlloc"):
        open_uploads(torch.device("cuda", 0))
    assert not any(thread.name.startswith("weights-") for thread in threading.enumerate())


def test_a_load_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    source = write(tmp_path, {"t": torch.ones(500, 4)})
    parts = [Part(name=name, shape=(500, 4)) for name in ("t", "other")]
    with pytest.raises(StartupError, match="lacks tensor other"), uploading() as uploads:
        build_loader(source, uploads, torch.float32).stack(parts)
    assert not any(thread.is_alive() for thread in uploads._carriers.threads)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_onto_a_gpu(tmp_path: Path) -> None:
    """With more pieces than buffers, and what is computed at once: in inference mode torch does not decompose `to` and
    `reshape`, which call themselves views."""
    tensors = {f"t{number}": torch.randn(3000, 4096).bfloat16() for number in range(20)}
    source, device = write(tmp_path, tensors), torch.device("cuda", 0)
    with torch.inference_mode(), open_uploads(device) as uploads:
        loader = WeightLoader(source, dtype=torch.bfloat16, device=device, keeps_packed=False, uploads=uploads)
        parts = [Part(name=name, shape=(3000, 4096), piece=Slice(0, 7, 2900)) for name in tensors]
        first = loader.stack(parts[:3]).float().sum()
        found = [loader.stack(parts[number : number + 2]) for number in range(0, 20, 2)]
    expected = [tensors[part.name][7:2900] for part in parts]
    assert torch.equal(torch.cat(found).cpu(), torch.cat(expected))
    assert first == torch.cat(expected[:3]).cuda().float().sum()
