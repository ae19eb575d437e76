"""A start believes what an earlier one measured only where all is there that the earlier one compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tandem_api.launch import WorkerConfig
from tandem_worker.model.prepared.kernels import PreparedKernels
from tandem_worker.model.prepared.store import PreparedStore
from tandem_worker.process.known import KnownStart, find_known_start

FACTS = {"gpu": "H200", "driver": "580", "triton": "3.6.0", "sources": "a"}


def open_kernels(store: PreparedStore, folder: Path, **facts: str) -> PreparedKernels:
    kernels = PreparedKernels(store, folder, FACTS | facts)
    kernels.restore()
    return kernels


def compile_into(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "k.cubin").write_bytes(name.encode() * 50)


def start(store: PreparedStore, folder: Path, compiled: tuple[str, ...], measured: int, **facts: str) -> KnownStart:
    """A whole start: what it finds, compiles, measures and keeps."""
    kernels = open_kernels(store, folder, **facts)
    known = KnownStart(store, kernels, {"model": "m"})
    compile_into(folder, *compiled)
    assert known.measure("activations", lambda: measured) >= 0
    assert kernels.save()
    known.save()
    return known


@pytest.fixture
def store(tmp_path: Path) -> PreparedStore:
    return PreparedStore(tmp_path / "store")


def test_the_second_start_measures_nothing(store: PreparedStore, tmp_path: Path) -> None:
    assert not start(store, tmp_path / "one", ("AAAA", "BBBB"), 7).is_complete
    second = start(store, tmp_path / "two", ("AAAA", "BBBB"), 8)
    assert second.is_complete
    assert second.measure("activations", lambda: 9) == 7
    assert second.measure("recordings of 8 rows", lambda: 9) == 9, "this was not measured then"


@pytest.mark.parametrize("other", [{"gpu": "H100"}, {"driver": "590"}, {"sources": "b"}])
def test_another_device_or_other_kernels(store: PreparedStore, tmp_path: Path, other: dict[str, str]) -> None:
    start(store, tmp_path / "one", ("AAAA",), 7)
    assert not start(store, tmp_path / "two", ("AAAA",), 8, **other).is_complete


def test_a_kernel_is_missing(store: PreparedStore, tmp_path: Path) -> None:
    """Another container, which did not know of this model's, has kept its own in their place."""
    start(store, tmp_path / "one", ("AAAA", "BBBB"), 7)
    kernels = PreparedKernels(store, tmp_path / "other", FACTS)
    compile_into(tmp_path / "other", "AAAA", "CCCC")
    assert kernels.save()
    third = start(store, tmp_path / "three", ("BBBB",), 9)
    assert not third.is_complete
    assert third.measure("activations", lambda: 0) == 9
    assert start(store, tmp_path / "four", (), 0).is_complete, "what the third start compiled was kept with the rest"


@pytest.mark.parametrize(
    "content",
    [
        b"{", b"[]", b"[" * 100_000, b'{"kernels": 1}', b'{"kernels": [], "measures": {"a": "b"}}', b"\xff",
        *(b'{"kernels": ["AAAA/k.cubin"], "measures": {"activations": %b}}' % size for size in (
            b"-1", b"1e999", b"NaN", b"1.5", b"true", b"null", b"1" + b"0" * 30,
        )),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_measured_anew(store: PreparedStore, tmp_path: Path, content: bytes) -> None:
    known = start(store, tmp_path / "one", ("AAAA",), 7)
    store.discard(store.open(known._name), ValueError("to write it anew"))  # type: ignore[arg-type]
    assert store.write(known._name, content)
    assert not start(store, tmp_path / "two", (), 7).is_complete


def config(**changes: Any) -> WorkerConfig:
    document = {
        "modelName": "m", "servedName": "m", "role": "unified", "revision": "r",
        "model": {"uri": "file:///m", "cacheDir": "/cache"},
    }  # fmt: skip
    return WorkerConfig.model_validate(document | changes)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"revision": "r2", "servedName": "n", "httpPort": 9}, True),
        ({"kv": {"port": 7}}, True),
        ({"kv": {"blockSize": 32}}, False),
        ({"scheduler": {"maxBatchTokens": 4096}}, False),
        ({"maxModelLen": 100}, False),
        ({"role": "decode"}, False),
    ],
)
def test_what_a_name_says(store: PreparedStore, tmp_path: Path, changes: dict[str, Any], same: bool) -> None:
    kernels = open_kernels(store, tmp_path / "one")
    (tmp_path / "config.json").write_text("{}")
    names = [
        find_known_start(store, kernels, each, tmp_path, records=True)._name for each in (config(), config(**changes))
    ]
    assert (names[0] == names[1]) == same
    assert find_known_start(store, kernels, config(), tmp_path, records=False)._name != names[0]
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert find_known_start(store, kernels, config(), tmp_path, records=True)._name != names[0]


def test_another_file_under_the_same_name(store: PreparedStore, tmp_path: Path) -> None:
    """A folder with a GGUF file has no config.json that would tell."""
    kernels = open_kernels(store, tmp_path / "one")
    model, draft = tmp_path / "model", tmp_path / "draft"
    model.mkdir()
    draft.mkdir()

    def name() -> str:
        return find_known_start(store, kernels, config(), model, records=True, draft=draft)._name

    (model / "m.gguf").write_bytes(b"a")
    (draft / "model.safetensors").write_bytes(b"a")
    (draft / "config.json").write_text("{}")
    first = name()
    (model / "m.gguf").write_bytes(b"ab")
    second = name()
    (draft / "config.json").write_text("[]")
    assert len({first, second, name()}) == 3
