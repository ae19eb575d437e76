from __future__ import annotations

from pathlib import Path

import pytest
from tandem_api.launch import ModelSource
from tandem_worker.errors import StartupError
from tandem_worker.sources.claim import resolve_claim
from tandem_worker.sources.digest import model_digest
from tandem_worker.sources.resolve import resolve_model


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


@pytest.mark.parametrize("offset", [0, 500_000, 999_999])
def test_digest_of_other_weights_differs(model: Path, offset: int) -> None:
    before = model_digest(model)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(offset)
        file.write(b"\x01")
    assert model_digest(model) != before
