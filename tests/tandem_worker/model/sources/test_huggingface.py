"""Downloads against a real HTTP server."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tandem_worker.host.errors import StartupError
from tandem_worker.model.sources import huggingface as hub_source
from tandem_worker.model.sources.digest import MANIFEST, model_digest
from tandem_worker.model.sources.resolve import resolve_model


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library sleeps a second before it resumes."""
    from huggingface_hub import file_download

    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)


def refusal(hub: Any, tmp_path: Path, token: str | None = None, **changes: str) -> StartupError:
    with pytest.raises(StartupError) as caught:
        resolve_model(hub.source(tmp_path / "cache", **changes), token)
    return caught.value


def test_only_what_is_needed_is_downloaded(hub: Any, tmp_path: Path) -> None:
    folder = resolve_model(hub.source(tmp_path / "cache"))
    names = {path.name for path in folder.iterdir() if not path.name.startswith("lease")}
    assert names == {"config.json", "tokenizer.json", "model.safetensors", MANIFEST}
    assert (folder / "model.safetensors").read_bytes() == bytes(range(256)) * 4000


def test_an_embedding_models_pooling_is_downloaded_from_its_folder(hub: Any, tmp_path: Path) -> None:
    """The hub lists what is in folders to those who ask for it, and to nobody else."""
    folder = hub.root / "org" / "model" / "1_Pooling"
    folder.mkdir()
    (folder / "config.json").write_text('{"pooling_mode_cls_token": true}')
    hub.add("org/model", modules__json=b"[]")
    downloaded = resolve_model(hub.source(tmp_path / "cache"))
    assert (downloaded / "1_Pooling" / "config.json").read_text() == '{"pooling_mode_cls_token": true}'


def test_a_downloaded_model_is_not_downloaded_again(hub: Any, tmp_path: Path) -> None:
    first = resolve_model(hub.source(tmp_path / "cache"))
    hub.downloads.clear()
    assert resolve_model(hub.source(tmp_path / "cache")) == first
    assert hub.downloads == []


def test_a_downloaded_commit_needs_no_hub(hub: Any, tmp_path: Path) -> None:
    first = resolve_model(hub.source(tmp_path / "cache"))
    source = hub.source(tmp_path / "cache", revision=first.name).model_copy(
        update={"hub_endpoint": "http://127.0.0.1:1"}
    )
    assert resolve_model(source) == first


def test_a_branch_stays_usable_while_the_hub_is_away(hub: Any, tmp_path: Path) -> None:
    first = resolve_model(hub.source(tmp_path / "cache"))
    source = hub.source(tmp_path / "cache").model_copy(update={"hub_endpoint": "http://127.0.0.1:1"})
    assert resolve_model(source) == first


def test_a_moved_branch_is_followed(hub: Any, tmp_path: Path) -> None:
    first = resolve_model(hub.source(tmp_path / "cache"))
    hub.add("org/model", config__json=b'{"new": 1}')
    second = resolve_model(hub.source(tmp_path / "cache"))
    assert second != first
    assert (second / "config.json").read_bytes() == b'{"new": 1}'
    assert model_digest(second) != model_digest(first)


def test_a_dropped_connection_is_resumed(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.drop_after = 300_000
    folder = resolve_model(hub.source(tmp_path / "cache"))
    assert (folder / "model.safetensors").read_bytes() == bytes(range(256)) * 4000
    assert ("model.safetensors", 300_000) in hub.downloads


def test_a_damaged_file_is_downloaded_again(hub: Any, tmp_path: Path) -> None:
    hub.corrupt, hub.corruptions = "model.safetensors", 1
    folder = resolve_model(hub.source(tmp_path / "cache"))
    assert (folder / "model.safetensors").read_bytes() == bytes(range(256)) * 4000
    assert hub.downloads.count(("model.safetensors", 0)) == 2


def test_a_file_that_stays_damaged_is_refused(hub: Any, tmp_path: Path) -> None:
    hub.corrupt, hub.corruptions = "model.safetensors", 99
    error = refusal(hub, tmp_path)
    assert error.reason == "DownloadCorrupt"
    assert "model.safetensors" in str(error)
    assert not list((tmp_path / "cache").rglob(MANIFEST))


def test_unknown_repository(hub: Any, tmp_path: Path) -> None:
    error = refusal(hub, tmp_path, repository="org/absent")
    assert error.reason == "ModelNotFound"
    assert "org/absent" in str(error)


def test_unknown_revision(hub: Any, tmp_path: Path) -> None:
    error = refusal(hub, tmp_path, revision="v9")
    assert error.reason == "RevisionNotFound"
    assert "'v9'" in str(error)


@pytest.mark.parametrize(("token", "words"), [(None, "no token was given"), ("wrong", "does not open it")])
def test_private_repository(hub: Any, tmp_path: Path, token: str | None, words: str) -> None:
    hub.add("org/model", __private=b"right")
    error = refusal(hub, tmp_path, token)
    assert error.reason == "AccessDenied"
    assert words in str(error)
    assert resolve_model(hub.source(tmp_path / "cache"), "right").is_dir()


def test_unreachable_hub(hub: Any, tmp_path: Path) -> None:
    source = hub.source(tmp_path / "cache").model_copy(update={"hub_endpoint": "http://127.0.0.1:1"})
    with pytest.raises(StartupError) as caught:
        resolve_model(source)
    assert caught.value.reason == "HubUnreachable"


def test_a_repository_without_weights(hub: Any, tmp_path: Path) -> None:
    hub.add("org/empty", config__json=b"{}")
    assert refusal(hub, tmp_path, repository="org/empty").reason == "NoWeights"


def test_a_full_disk_is_noticed_before_the_download(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_source.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    error = refusal(hub, tmp_path)
    assert error.reason == "DiskFull"
    assert "spec.model.cache" in str(error)
    assert hub.downloads == []


def test_workers_share_one_download(hub: Any, tmp_path: Path) -> None:
    hub.gate.clear()
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model(hub.source(tmp_path / "cache")))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while not hub.downloads:
        time.sleep(0.01)
    hub.gate.set()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert len(hub.downloads) == 3  # three files, once each


def everything_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize(
    "sha",
    [
        "../../../escaped",
        "/tmp/escaped",
        "..",
        "main",
        "",
        "a" * 39,
        "A" * 40,
        "a" * 41,
        "a" * 40 + "\n",
        "é" * 40,
        7,
        [],
    ],
    ids=str,
)
def test_what_is_no_commit_never_becomes_a_path(hub: Any, tmp_path: Path, sha: object) -> None:
    hub.lies["sha"] = sha
    before = everything_in(tmp_path)
    error = refusal(hub, tmp_path)
    assert error.reason == "HubAnswerInvalid"
    assert "commit" in str(error)
    assert everything_in(tmp_path) == before


def test_a_hub_may_name_commits_by_sha256(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.repositories, "commits", lambda repository: ["5a" * 32])
    assert resolve_model(hub.source(tmp_path / "cache")).name == "5a" * 32


@pytest.mark.parametrize("content", ["../../other--model/main", "a" * 39, "\0", "\udcff"])
def test_a_note_of_a_branch_that_names_no_commit_is_not_followed(hub: Any, tmp_path: Path, content: str) -> None:
    resolve_model(hub.source(tmp_path / "cache"))
    note = tmp_path / "cache" / "hub" / "org--model" / "refs" / "main"
    note.write_bytes(content.encode(errors="surrogateescape"))
    source = hub.source(tmp_path / "cache").model_copy(update={"hub_endpoint": "http://127.0.0.1:1"})
    with pytest.raises(StartupError) as caught:
        resolve_model(source)
    assert caught.value.reason == "HubUnreachable"


@pytest.mark.parametrize(
    "name",
    [
        "1_Pooling/config.json\0", "../1_Pooling/config.json", "/1_Pooling/config.json", "x/../1_Pooling/config.json",
        "..\\model-00001-of-00001.safetensors", "model\0.safetensors", "../model.safetensors", "/model.safetensors",
        "..", ".", "", "x//1_Pooling/config.json", "model-1-of-1.safetensors/../../../x.safetensors",
        "..\\..\\q.gguf", "C:\\model.safetensors",
    ],
)  # fmt: skip
def test_no_listed_name_leads_out_of_the_folder(hub: Any, tmp_path: Path, name: str) -> None:
    """Such a file is not wanted, or it is refused: in no case is anything written elsewhere."""
    (hub.root / "org" / "model" / "model.safetensors").unlink()
    hub.add("org/model", other__safetensors=b"x" * 50)
    hub.listed.append({"type": "file", "path": name, "size": 3, "oid": "a" * 40})
    cache = tmp_path / "cache"
    outside = {path for path in everything_in(tmp_path) if cache not in path.parents}
    refused: list[str] = []
    try:
        resolve_model(hub.source(cache))
    except StartupError as error:
        refused = [error.reason]
    assert refused in ([], ["HubAnswerInvalid"])
    assert {path.name for path in everything_in(cache) if path.is_file()} <= {
        "config.json", "tokenizer.json", "other.safetensors", MANIFEST, "lease.1", "main",
    }  # fmt: skip
    elsewhere = {path for path in everything_in(tmp_path) if cache not in path.parents} - {cache}
    assert elsewhere == outside


@pytest.mark.parametrize("name", ["..\\model-00001-of-00001.safetensors", "model\0.safetensors", "\\.safetensors"])
def test_a_wanted_file_with_a_hostile_name_is_refused(hub: Any, tmp_path: Path, name: str) -> None:
    (hub.root / "org" / "model" / "model.safetensors").unlink()
    hub.listed.append({"type": "file", "path": name, "size": 3, "oid": "a" * 40})
    assert refusal(hub, tmp_path).reason == "HubAnswerInvalid"
    assert hub.downloads == []


@pytest.mark.parametrize("size", [-1, "12", None, 1.5])
def test_a_size_that_is_none_is_refused(hub: Any, tmp_path: Path, size: object) -> None:
    hub.listed.append({"type": "file", "path": "vocab.json", "size": size, "oid": "a" * 40})
    error = refusal(hub, tmp_path)
    assert error.reason == "HubAnswerInvalid"
    assert "vocab.json" in str(error)


def test_a_link_in_the_cache_is_not_written_through(hub: Any, tmp_path: Path) -> None:
    folder = resolve_model(hub.source(tmp_path / "cache"))
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (folder / MANIFEST).unlink()
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(precious)
    error = refusal(hub, tmp_path)
    assert error.reason == "CacheInvalid"
    assert precious.read_text() == "mine"


DOWNLOAD = """
import sys
from tandem_api.launch import ModelSource
from tandem_worker.model.sources.resolve import resolve_model
resolve_model(ModelSource(uri="hf://org/model", cache_dir=sys.argv[1], hub_endpoint=sys.argv[2]))
"""


def test_a_killed_download_is_taken_over(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gate.clear()
    with subprocess.Popen([sys.executable, "-c", DOWNLOAD, str(tmp_path / "cache"), hub.url]) as process:
        try:
            while not hub.downloads:
                assert process.poll() is None
                time.sleep(0.02)
        finally:
            process.kill()
    hub.gate.set()
    acquire = hub_source.lease.acquire
    monkeypatch.setattr(
        hub_source.lease, "acquire", lambda *a, **k: acquire(*a, **k, stale_seconds=0.3, poll_seconds=0.05)
    )
    assert resolve_model(hub.source(tmp_path / "cache")).is_dir()
