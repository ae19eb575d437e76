"""`spec.model.cache.pack`: who downloads packs, verifies, and leaves the packed copy alone."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save
from tandem_api.launch import ModelSource, PackedForm
from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.files import find_safetensors, is_packed
from tandem_worker.model.checkpoint.lossless import LosslessSource
from tandem_worker.model.checkpoint.packed_folder import LIST
from tandem_worker.model.sources import packed
from tandem_worker.model.sources.digest import MANIFEST
from tandem_worker.model.sources.resolve import resolve_model

from tests.tandem_worker.model.lossless.checkpoints import bits, small

FORMS: tuple[PackedForm, ...] = ("Fixed", "Archive")


@pytest.fixture
def source(hub: Any, tmp_path: Path) -> Any:
    hub.add("org/model", model__safetensors=save(small()))

    def source(pack: PackedForm | None, repository: str = "org/model") -> ModelSource:
        return hub.source(tmp_path / "cache", repository).model_copy(update={"pack": pack})

    return source


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("lease")}


@pytest.mark.parametrize("form", FORMS)
def test_only_the_packed_copy_stays(form: PackedForm, hub: Any, source: Any, tmp_path: Path) -> None:
    folder = resolve_model(source(form))
    assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors", LIST, MANIFEST}
    assert [path.name for path in folder.parent.iterdir() if path.name != "refs"] == [folder.name]
    expected = load_file(hub.root / "org" / "model" / "model.safetensors")
    read = LosslessSource(folder, find_safetensors(folder))
    for name, value in expected.items():
        assert bytes(bits(read.read(name))) == bytes(bits(value))
    hub.downloads.clear()
    assert resolve_model(source(form)) == folder
    assert hub.downloads == []


def test_forms_and_the_plain_copy_lie_beside_each_other(hub: Any, source: Any) -> None:
    """A plain copy is packed without a download, and left to those who use it."""
    plain = resolve_model(source(None))
    hub.downloads.clear()
    folders = [resolve_model(source(form)) for form in FORMS]
    assert hub.downloads == []
    assert len({plain, *folders}) == 3
    assert not is_packed(plain)
    assert (plain / MANIFEST).is_file()
    assert all(is_packed(folder) for folder in folders)


def test_a_packed_commit_needs_no_hub(hub: Any, source: Any) -> None:
    folder = resolve_model(source("Archive"))
    away = source("Archive").model_copy(update={"hub_endpoint": "http://127.0.0.1:9", "revision": folder.name[:40]})
    assert resolve_model(away) == folder


def test_several_starts_pack_once(hub: Any, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packs: list[Path] = []
    pack = packed.pack

    def noting(*arguments: Any, **options: Any) -> Any:
        packs.append(arguments[1])
        return pack(*arguments, **options)

    monkeypatch.setattr(packed, "pack", noting)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model(source("Fixed")))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(packs) == 1


@pytest.mark.parametrize("at", ["packed.pack", "packed.verify", "huggingface._forget_original"])
def test_what_a_killed_start_left_is_gone_on_with(
    at: str, hub: Any, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is downloaded twice, and nothing of the first try is believed."""
    with monkeypatch.context() as context:

        def die(*arguments: Any, **options: Any) -> Any:
            raise KeyboardInterrupt

        context.setattr(f"tandem_worker.model.sources.{at}", die)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(source("Archive"))
    hub.downloads.clear()
    folder = resolve_model(source("Archive"))
    assert hub.downloads == []
    assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors", LIST, MANIFEST}
    LosslessSource(folder, find_safetensors(folder))


def test_half_a_move_is_begun_anew(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, moved = Path.rename, []

    def dying(self: Path, target: Path) -> Path:
        if self.parent.name == ".packed":
            if moved:
                raise KeyboardInterrupt
            moved.append(self)
        return rename(self, target)

    with monkeypatch.context() as context:
        context.setattr(Path, "rename", dying)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(source("Fixed"))
    folder = resolve_model(source("Fixed"))
    assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors", LIST, MANIFEST}


def test_a_model_that_cannot_be_packed_is_kept_as_it_is(hub: Any, source: Any) -> None:
    hub.add("org/gguf", config__json=b"{}", model__gguf=b"GGUF...")
    folder = resolve_model(source("Archive", "org/gguf"))
    assert (folder / "model.gguf").read_bytes() == b"GGUF..."
    assert not is_packed(folder)
    assert names(folder) == {"config.json", "model.gguf", MANIFEST}
    assert resolve_model(source("Archive", "org/gguf")) == folder


@pytest.mark.parametrize("has_links", [True, False])
def test_what_is_kept_as_it_is_takes_room_once(
    has_links: bool, hub: Any, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system lets a file have two names."""

    def link(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", link)
    hub.add("org/gguf", config__json=b"{}", model__gguf=b"GGUF...")
    plain, kept = (resolve_model(source(pack, "org/gguf")) / "model.gguf" for pack in (None, "Archive"))
    assert plain != kept
    assert kept.read_bytes() == b"GGUF..."
    assert plain.samefile(kept) == has_links


def test_a_packed_repository_is_kept_as_it_is(hub: Any, source: Any) -> None:
    """Somebody may publish packed checkpoints: what the list names beside the weights need not be downloaded."""
    made = resolve_model(source("Fixed"))
    files = {name.replace(".", "__"): (made / name).read_bytes() for name in names(made) - {MANIFEST}}
    hub.add("org/packed", **files)
    for pack in (None, "Archive"):
        folder = resolve_model(source(pack, "org/packed"))
        assert (folder / LIST).read_bytes() == (made / LIST).read_bytes()
        LosslessSource(folder, find_safetensors(folder))


def test_a_damaged_model_is_told(hub: Any, source: Any) -> None:
    hub.add("org/model", model__safetensors=save(small())[:-7])
    with pytest.raises(StartupError, match=r"model\.safetensors.*pack to None") as caught:
        resolve_model(source("Fixed"))
    assert caught.value.reason == "WeightsCorrupt"


def test_a_claim_without_room_for_both_copies_is_told(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed, "pack", pack)
    with pytest.raises(StartupError, match=r"packed copy.*larger claim.*pack to None") as caught:
        resolve_model(source("Fixed"))
    assert caught.value.reason == "DiskFull"
