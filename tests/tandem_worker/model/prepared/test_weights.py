"""Prepared copies of weights: equal to what they were made from in every bit, or not used."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tandem_api.launch import WeightsForm
from tandem_worker.model.backends import native
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.load import load_model
from tandem_worker.model.prepared import reading as reading_module
from tandem_worker.model.prepared import weights as weights_module
from tandem_worker.model.prepared.entry import CHUNK, DamagedError, Entry
from tandem_worker.model.prepared.reading import Reading, open_library
from tandem_worker.model.prepared.store import PreparedStore
from tandem_worker.model.prepared.weights import PreparedWeights, open_prepared_weights
from tandem_worker.parallel.context import ParallelContext

from tests.tandem_worker.model.backends.test_backends import CASES, save_family, steps, three_sequences
from tests.tandem_worker.model.checkpoint.test_checkpoints import write_gguf
from tests.tandem_worker.model.layers.ranks import run_ranks

if native.find_obstacle() is not None or open_library() is None:
    pytest.skip(native.find_obstacle() or "oneDNN packs weights here", allow_module_level=True)

CPU = torch.device("cpu")


def load(path: Path, prepared: PreparedWeights | None = None, context: ParallelContext | None = None) -> CausalLM:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "backend": BackendName.NATIVE, "weights": "Plain"}
    if context is not None:
        options["context"] = context
    return load_model(path, device=CPU, prepared=prepared, **options)


def open_weights(store: PreparedStore, **facts: object) -> PreparedWeights:
    return open_prepared_weights(store, "0" * 32, facts)


def answers(model: CausalLM, paged_sequences: Any) -> list[torch.Tensor]:
    run = three_sequences(model, paged_sequences)
    size = model.vocab_size
    return [run.step({row: [token % size for token in tokens] for row, tokens in new.items()}) for new in steps()]


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    return tmp_path / "model.gguf"


@pytest.fixture
def store(tmp_path: Path) -> PreparedStore:
    return PreparedStore(tmp_path / "prepared")


def only_file(store: PreparedStore) -> Path:
    (file,) = store.folder.iterdir()
    return file


@pytest.mark.parametrize("family", CASES)
def test_every_family_computes_the_same_of_a_copy(
    family: str, save_random_model: Any, paged_sequences: Any, tmp_path: Path, store: PreparedStore
) -> None:
    save_family(family, save_random_model, tmp_path)
    expected = answers(load(tmp_path), paged_sequences)
    first = open_weights(store)
    model = load(tmp_path, first)
    assert_equal(answers(model, paged_sequences), expected)  # and before it is saved: what is saved was used
    assert first.save()
    second = open_weights(store)
    assert second.found
    assert_equal(answers(load(tmp_path, second), paged_sequences), expected)
    written = only_file(store).stat().st_mtime_ns
    assert second.save(), "all came from the copy, which stays"
    assert only_file(store).stat().st_mtime_ns == written


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_ranks_have_copies_of_their_own(kind: str, paged_sequences: Any, tmp_path: Path, store: PreparedStore) -> None:
    """The same facts for both on purpose: what one rank kept is not what the other asks for."""
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf.GGMLQuantizationType[kind])

    def run(number: int | None) -> list[list[torch.Tensor]]:
        def rank(collective: Any) -> list[torch.Tensor]:
            context = ParallelContext(tp_rank=collective.rank, tp_size=2, tp=collective)
            shared = {} if number else {"rank": collective.rank}
            prepared = None if number is None else open_weights(store, **shared)
            result = answers(load(path, prepared, context), paged_sequences)
            if prepared is not None and collective.rank == 0:
                prepared.save()
            return result

        return run_ranks(2, rank)

    expected = run(None)
    for number in (0, 0, 1, 1):
        for actual, plain in zip(run(number), expected, strict=True):
            assert_equal(actual, plain)


@pytest.mark.parametrize("form", ["Plain", "Lossless"])
def test_what_kernels_do_not_widen_is_kept_too(
    form: WeightsForm, tmp_path: Path, store: PreparedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types of files that only the library reads: a copy was asked for what they are not, and removed at each start."""

    def quantize(value: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        """Blocks of 32: a scale of two bytes, and half a byte each."""
        blocks = np.random.default_rng(value.shape[0]).integers(0, 256, (value.shape[0], 8, 18), dtype=np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
        return blocks.reshape(value.shape[0], -1)

    monkeypatch.setattr(gguf.quants, "quantize", quantize)
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf.GGMLQuantizationType.IQ4_NL)
    for again in (False, True):
        prepared = open_prepared_weights(store, "0" * 32, {}, [form.lower()])
        assert prepared.found is again
        load_model(path, device=CPU, dtype=torch.bfloat16, prepared=prepared, weights=form)
        assert prepared.is_whole is again
        assert prepared.save()


def test_weights_are_packed_as_they_are_read(tmp_path: Path) -> None:
    """The loader's two ways, through every source and slice, make the same bits."""
    from tandem_worker.model.backends.native.packing import NativePacker, lay_out
    from tandem_worker.model.checkpoint.loader import Part, WeightLoader
    from tandem_worker.model.checkpoint.stored import PackedWeight, Slice
    from tandem_worker.model.load import open_checkpoint

    write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_1)
    _, source = open_checkpoint(tmp_path / "model.gguf")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CPU, "keeps_packed": False}
    plain, direct = WeightLoader(source, **options), WeightLoader(source, **options, packer=NativePacker())
    prefix = "model.layers.0.self_attn."
    for piece in (None, Slice(0, 64, 128), Slice(1, 32, 96), Slice(1, 3, 101)):
        shapes = {"q": 256, "k": 128, "v": 128}
        parts = [Part(name=f"{prefix}{name}_proj.weight", shape=(n, 256), piece=piece) for name, n in shapes.items()]
        expected = plain.stack(parts)
        assert torch.equal(direct.stack(parts), expected)
        packed = direct.matrix(parts)
        assert isinstance(packed, PackedWeight)
        laid_out = lay_out(expected)
        assert laid_out is not None
        assert torch.equal(packed.memory, laid_out)
        assert packed.shape == tuple(expected.shape)


def test_a_damaged_copy_is_told_deleted_and_made_anew(
    model_path: Path, paged_sequences: Any, store: PreparedStore, caplog: pytest.LogCaptureFixture
) -> None:
    expected, rng = answers(load(model_path), paged_sequences), random.Random(3)
    for turn in range(25):
        prepared = open_weights(store)
        load(model_path, prepared)
        assert prepared.save()
        file = only_file(store)
        whole = bytearray(file.read_bytes())
        if turn % 5 == 4:
            whole = whole[: rng.randrange(len(whole))]
        else:
            whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(whole)
        caplog.clear()
        damaged = open_weights(store)
        assert_equal(answers(load(model_path, damaged), paged_sequences), expected)
        assert "is damaged and is prepared anew" in caplog.text
        assert not list(store.folder.iterdir())


def test_damage_behind_what_was_handed_out_leaves_that_in_use(
    model_path: Path, paged_sequences: Any, store: PreparedStore
) -> None:
    """The first tensors come from the copy, the rest from the checkpoint, and the next copy is whole."""
    expected = answers(load(model_path), paged_sequences)
    prepared = open_weights(store)
    load(model_path, prepared)
    prepared.save()
    file, first = only_file(store), open_weights(store)
    payload = bytearray(first._store.read(first.name) or b"")
    first.finish()
    rows = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    changed = [[key if number < 3 else "another", start, size] for number, (key, start, size) in enumerate(rows)]
    text = json.dumps(changed).encode()
    file.unlink()
    assert len(text) <= rows[0][1] - 8
    payload[: 8 + len(text)] = len(text).to_bytes(8, "little") + text
    store.write(file.name, bytes(payload))
    mixed = open_weights(store)
    assert_equal(answers(load(model_path, mixed), paged_sequences), expected)
    assert mixed.save()
    whole = open_weights(store)
    assert_equal(answers(load(model_path, whole), paged_sequences), expected)
    assert not whole._missed


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"short",
        (2**62).to_bytes(8, "little") + bytes(100),
        (4).to_bytes(8, "little") + b"null" + bytes(100),
        (3).to_bytes(8, "little") + b'{"}' + bytes(100),
        *(
            len(text).to_bytes(8, "little") + text + bytes(1000)
            for text in (
                *(b"[1]", b'[["key"]]', b'[["key",64,-1]]', b'[["key",64,99999]]'),
                *(b'[["key",0,8]]', b'[["key",65,8]]'),
            )
        ),
    ],
    ids=range(11),
)
def test_a_list_that_lies_is_not_followed(
    payload: bytes, model_path: Path, paged_sequences: Any, store: PreparedStore, caplog: pytest.LogCaptureFixture
) -> None:
    name = open_weights(store).name
    store.write(name, payload)
    prepared = open_weights(store)
    model = load(model_path, prepared)
    assert_equal(answers(model, paged_sequences), answers(load(model_path), paged_sequences))
    assert "is damaged" in caplog.text
    assert not list(store.folder.iterdir())


def test_other_facts_are_other_copies(model_path: Path, store: PreparedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = open_weights(store, dtype="Auto")
    load(model_path, prepared)
    assert prepared.save()
    assert open_weights(store, dtype="Auto").found
    assert not open_weights(store, dtype="bfloat16").found
    assert not open_prepared_weights(store, "1" * 32, {"dtype": "Auto"}).found
    monkeypatch.setattr(weights_module, "LAYOUT", weights_module.LAYOUT + 1)
    assert not open_weights(store, dtype="Auto").found


def test_other_element_types_and_backends_use_no_copy(model_path: Path, store: PreparedStore) -> None:
    prepared = open_weights(store)
    load(model_path, prepared)
    prepared.save()
    other = open_weights(store)
    load_model(model_path, device=CPU, dtype=torch.float32, prepared=other)
    assert not other.save()
    assert only_file(store).name == other.name


def test_a_load_that_fails_ends_the_reading(tmp_path: Path, model_path: Path, store: PreparedStore) -> None:
    prepared = open_weights(store)
    load(model_path, prepared)
    prepared.save()
    begun = open_weights(store)
    with pytest.raises(Exception, match="no model"):
        load(tmp_path / "nowhere", begun)
    assert not begun.found


@pytest.mark.parametrize("size", [*range(70), CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 12345])
def test_native_sums_are_those_of_the_library(size: int, store: PreparedStore) -> None:
    payload = random.Random(size).randbytes(size)
    store.write("a", payload)
    entry, library = store.open("a"), open_library()
    assert entry is not None
    assert library is not None
    reading = Reading(library, entry)
    reading.wait(0, size)
    assert reading.memory[:size] == payload
    reading.end()
    reading.end()


def test_wrong_sums_and_unreadable_files_are_told_apart(store: PreparedStore, tmp_path: Path) -> None:
    store.write("a", bytes(2 * CHUNK + 5))
    library = open_library()
    assert library is not None
    entry = store.open("a")
    assert entry is not None
    wrong = Reading(library, replace(entry, sums=entry.sums[:8] + bytes(8) + entry.sums[16:]))
    wrong.wait(0, CHUNK)
    wrong.wait(2 * CHUNK, 2 * CHUNK + 5)
    with pytest.raises(DamagedError, match="do not have the sums"):
        wrong.wait(0, CHUNK + 1)
    wrong.end()
    descriptor = os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT)
    unreadable = Reading(library, Entry("a", tmp_path / "written", descriptor, 100, bytes(8)))
    with pytest.raises(OSError, match="Bad file descriptor"):
        unreadable.wait(0, 1)
    unreadable.end()


def test_cpus_without_the_instructions_read_nothing(
    model_path: Path, store: PreparedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = open_weights(store)
    load(model_path, prepared)
    prepared.save()
    for features in (frozenset(), reading_module.cpu_features() | {"amx_bf16"}):
        open_library.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(reading_module, "cpu_features", lambda given=features: given)
            assert open_library() is None
    open_library.cache_clear()


_NO_TORCH = """
import sys
from pathlib import Path
from tandem_worker.model.prepared.store import PreparedStore
from tandem_worker.model.prepared.weights import open_prepared_weights
assert open_prepared_weights(PreparedStore(Path(sys.argv[1])), "0" * 32, {}).found
heavy = {"torch", "numpy", "gguf", "triton"} & set(sys.modules)
assert not heavy, heavy
"""


def test_reading_begins_without_torch(model_path: Path, store: PreparedStore) -> None:
    prepared = open_weights(store)
    load(model_path, prepared)
    prepared.save()
    subprocess.run([sys.executable, "-c", _NO_TORCH, store.folder], check=True, timeout=60)


_START = """
import sys
from pathlib import Path
from tandem_worker.model.prepared.store import PreparedStore
from tandem_worker.model.prepared.weights import PreparedWeights
import ctypes
store = PreparedStore(Path(sys.argv[1]))
memory = [bytes([number]) * (1 << 20) for number in range(12)]
print("ready", flush=True)
while True:
    weights = PreparedWeights(store, {"plain": "weights"})
    weights.begin(["plain"])
    for number, value in enumerate(memory):
        found = weights.take(str(number), len(value))
        if found is None:
            weights.put(str(number), ctypes.cast(value, ctypes.c_void_p).value, len(value), value)
        elif bytes(found[0][found[1] : found[1] + len(value)]) != value:
            print("WRONG", flush=True)
    weights.finish()
    weights._missed = True
    weights.save()
"""


def test_starts_that_are_killed_at_any_time_load_no_wrong_byte(tmp_path: Path) -> None:
    rng = random.Random(5)
    command = [sys.executable, "-c", _START, tmp_path]
    for _ in range(6):
        starts = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        for start in starts:
            assert start.stdout is not None
            assert start.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.3)
        for start in starts:
            start.send_signal(signal.SIGKILL)
            out, err = start.communicate(timeout=30)
            assert (out, err) == (b"", b"")
