from __future__ import annotations

from pathlib import Path

import pytest
from tandem_api.launch import ModelSource
from tandem_worker.host.errors import StartupError
from tandem_worker.model.sources import digest as digest_source
from tandem_worker.model.sources.claim import resolve_claim
from tandem_worker.model.sources.digest import MANIFEST, ModelDigest, list_files, model_digest
from tandem_worker.model.sources.resolve import resolve_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "claims" / "weights" / "llama"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1_000_000))
    return folder


def test_file(model: Path) -> None:
    assert resolve_model(ModelSource(uri=f"file://{model}")) == model


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("file:///absent", "ModelNotFound"),
        ("file://relative", "UnsupportedModelURI"),
        ("file:///../../etc", "UnsupportedModelURI"),
        ("file:///tmp/%2e%2e/etc", "UnsupportedModelURI"),
        ("pvc://weights/x", "ModelNotFound"),
        ("s3://bucket/x", "UnsupportedModelURI"),
        ("model", "UnsupportedModelURI"),
    ],
)
def test_what_cannot_be_resolved(uri: str, reason: str) -> None:
    with pytest.raises(StartupError) as caught:
        resolve_model(ModelSource(uri=uri))
    assert caught.value.reason == reason


def claim(model: Path, uri: str) -> Path:
    return resolve_claim(ModelSource(uri=uri), claims=str(model.parents[1]))


def test_claim(model: Path) -> None:
    assert claim(model, "pvc://weights/llama/") == model
    assert claim(model, "pvc://weights/") == model.parent


@pytest.mark.parametrize(
    "uri", ["pvc://weights/absent", "pvc://absent/llama", "pvc:///llama", "pvc://weights/../weights"]
)
def test_claims_that_do_not_have_it(model: Path, uri: str) -> None:
    with pytest.raises(StartupError):
        claim(model, uri)


def test_digest_names_the_weights_not_their_place(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert model_digest(copy) == model_digest(model)
    assert model_digest(model / "model.safetensors") != model_digest(model)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("offset", [0, 65_536, 65_537, 262_144, 500_001, 999_999])
def test_every_byte_of_the_weights_counts(model: Path, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_source, "_SEGMENT", 262_144)
    monkeypatch.setattr(digest_source, "_CHUNK", 65_536)
    before = model_digest(model)
    flip(model / "model.safetensors", offset)
    assert model_digest(model) != before
    flip(model / "model.safetensors", offset)
    assert model_digest(model) == before


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
        "vocab.txt", "merges.txt", "chat_template.jinja", "qwen.tiktoken", "special_tokens_map.json", "some_new_thing",
        "modules.json", "1_Pooling/config.json", "additional_chat_templates/tools.jinja",
    ],
)  # fmt: skip
def test_what_may_be_read_counts(model: Path, name: str) -> None:
    """Added, changed by one byte, emptied, renamed."""
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    seen = [model_digest(model)]
    for content in (b"", b"abc", b"abd", b"abc\0"):
        path.write_bytes(content)
        seen.append(model_digest(model))
    path.rename(path.with_name("renamed" + path.name if path.parent == model else "config.json.jinja"))
    seen.append(model_digest(model))
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("name", ["README.md", ".gitattributes", "pytorch_model.bin", "lease.3", "deep/er/config.json"])
def test_what_is_never_read_does_not(model: Path, name: str) -> None:
    before = model_digest(model)
    (model / name).parent.mkdir(parents=True, exist_ok=True)
    (model / name).write_bytes(b"x")
    assert model_digest(model) == before


def test_content_cannot_move_between_files(model: Path) -> None:
    seen = set()
    for first, second in ((b"ab", b"c"), (b"a", b"bc"), (b"abc", b""), (b"", b"abc")):
        (model / "vocab.json").write_bytes(first)
        (model / "vocab.txt").write_bytes(second)
        seen.add(model_digest(model))
    assert len(seen) == 4


def test_shards_count_as_the_loader_reads_them(model: Path) -> None:
    """Those of the index, wherever they lie; without one that of the usual name, beside which others are the same
    weights in another layout."""
    (model / "extra.safetensors").write_bytes(b"1")
    assert [name for name, _ in list_files(model) if name.endswith(".safetensors")] == ["model.safetensors"]
    (model / "shards").mkdir()
    (model / "shards" / "a.safetensors").write_bytes(b"2")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"w": "shards/a.safetensors"}}')
    assert [name for name, _ in list_files(model)] == [
        "config.json", "model.safetensors.index.json", "shards/a.safetensors",
    ]  # fmt: skip


def test_a_manifest_is_not_believed(model: Path) -> None:
    (model / MANIFEST).write_text('{"files": {"model.safetensors": "abc"}}')
    before = model_digest(model)
    flip(model / "model.safetensors", 400_000)
    assert model_digest(model) != before


def test_a_gguf_file_counts_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(1000))
    alone, folder = model_digest(path), model_digest(tmp_path)
    assert alone == folder
    (tmp_path / "notes.json").write_text("{}")
    assert (model_digest(path), model_digest(tmp_path) == folder) == (alone, False)


def test_the_number_of_threads_does_not_matter(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_source, "_SEGMENT", 10_000)
    assert len({ModelDigest(model, threads).result() for threads in (1, 3, 200)}) == 1


def test_a_file_that_vanishes_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = list_files(model)
    (model / "config.json").unlink()
    monkeypatch.setattr(digest_source, "list_files", lambda path: listed)
    with pytest.raises(StartupError, match=r"config\.json") as caught:
        ModelDigest(model)
    assert caught.value.reason == "WeightsUnreadable"


def test_a_folder_in_place_of_a_file_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "sub").mkdir()
    monkeypatch.setattr(digest_source, "list_files", lambda path: [("sub", model / "sub")])
    with pytest.raises(StartupError, match="sub"):
        ModelDigest(model).result()
