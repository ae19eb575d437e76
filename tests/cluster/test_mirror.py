"""The mirror answers the real huggingface_hub client as the public hub would."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from e2e.mirror.server import MirrorServer

PUBLIC, PRIVATE, CORRUPT = "org/public", "org/private", "org/corrupt"
TOKEN = "sesame"
CONTENT = bytes(range(256)) * 12_000
"""About 3 MB: more than one piece of the server's reads."""


def serve(root: Path, drop_after: int | None) -> Iterator[str]:
    server = MirrorServer(("127.0.0.1", 0), root, drop_after)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for repository in (PUBLIC, PRIVATE, CORRUPT):
        folder = tmp_path / "root" / repository
        (folder / "nested").mkdir(parents=True)
        (folder / "model.gguf").write_bytes(CONTENT)
        (folder / "nested" / "config.json").write_text("{}")
    (tmp_path / "root" / PRIVATE / ".private").write_text(f"{TOKEN}\n")
    (tmp_path / "root" / CORRUPT / ".corrupt").touch()
    return tmp_path / "root"


@pytest.fixture
def endpoint(root: Path) -> Iterator[str]:
    yield from serve(root, None)


@pytest.fixture
def dropping(root: Path) -> Iterator[str]:
    yield from serve(root, 1_000_000)


def test_a_snapshot_has_every_file_and_no_marker(endpoint: str, tmp_path: Path) -> None:
    folder = Path(snapshot_download(PUBLIC, endpoint=endpoint, cache_dir=tmp_path / "cache"))
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"model.gguf", "nested/config.json"}
    assert (folder / "model.gguf").read_bytes() == CONTENT


def test_the_snapshot_is_named_by_the_commit(endpoint: str, tmp_path: Path) -> None:
    folder = snapshot_download(PUBLIC, endpoint=endpoint, cache_dir=tmp_path / "cache")
    assert HfApi(endpoint=endpoint).model_info(PUBLIC).sha == Path(folder).name


def test_a_commit_is_a_revision(endpoint: str, tmp_path: Path) -> None:
    commit = HfApi(endpoint=endpoint).model_info(PUBLIC).sha
    folder = snapshot_download(PUBLIC, revision=commit, endpoint=endpoint, cache_dir=tmp_path / "cache")
    assert Path(folder).name == commit


def test_a_branch_that_moves_is_another_commit_and_the_one_from_before_stays(endpoint: str, tmp_path: Path) -> None:
    before = HfApi(endpoint=endpoint).model_info(PUBLIC).sha
    moved = httpx.post(f"{endpoint}/move/{PUBLIC}").json()["sha"]
    assert moved != before
    assert HfApi(endpoint=endpoint).model_info(PUBLIC, revision="main").sha == moved
    for commit in (before, moved):
        folder = snapshot_download(PUBLIC, revision=commit, endpoint=endpoint, cache_dir=tmp_path / "cache")
        assert Path(folder).name == commit
    assert httpx.post(f"{endpoint}/move/org/absent").status_code == 404


def test_the_tree_carries_sha256_digests(endpoint: str) -> None:
    (file,) = (f for f in HfApi(endpoint=endpoint).list_repo_tree(PUBLIC) if f.path == "model.gguf")
    assert file.lfs.sha256 == hashlib.sha256(CONTENT).hexdigest()
    assert file.size == len(CONTENT)


def test_a_dropped_download_resumes_where_it_ended(dropping: str, tmp_path: Path) -> None:
    path = hf_hub_download(PUBLIC, "model.gguf", endpoint=dropping, cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == CONTENT


def test_a_range_is_answered_with_that_part(endpoint: str) -> None:
    answer = httpx.get(f"{endpoint}/{PUBLIC}/resolve/main/model.gguf", headers={"Range": "bytes=100-199"})
    assert (answer.status_code, answer.content) == (206, CONTENT[100:200])


def test_a_range_past_the_end_is_refused(endpoint: str) -> None:
    answer = httpx.get(f"{endpoint}/{PUBLIC}/resolve/main/model.gguf", headers={"Range": f"bytes={len(CONTENT)}-"})
    assert answer.status_code == 416


def test_a_corrupt_repository_sends_other_bytes_than_its_digest(endpoint: str) -> None:
    answer = httpx.get(f"{endpoint}/{CORRUPT}/resolve/main/model.gguf")
    assert answer.headers["ETag"].strip('"') == hashlib.sha256(CONTENT).hexdigest()
    assert answer.content[1:] == CONTENT[1:]
    assert answer.content[0] != CONTENT[0]


def test_a_private_repository_opens_with_its_token(endpoint: str, tmp_path: Path) -> None:
    path = hf_hub_download(PRIVATE, "model.gguf", endpoint=endpoint, cache_dir=tmp_path / "cache", token=TOKEN)
    assert Path(path).read_bytes() == CONTENT


@pytest.mark.parametrize("token", [False, "wrong"])
def test_a_private_repository_stays_shut_without_it(endpoint: str, tmp_path: Path, token: str | bool) -> None:
    with pytest.raises(RepositoryNotFoundError):
        snapshot_download(PRIVATE, endpoint=endpoint, cache_dir=tmp_path / "cache", token=token)


@pytest.mark.parametrize(
    ("repository", "revision", "file", "error"),
    [
        ("org/absent", "main", "model.gguf", RepositoryNotFoundError),
        (PUBLIC, "absent", "model.gguf", RevisionNotFoundError),
        (PUBLIC, "main", "absent.gguf", EntryNotFoundError),
        (PRIVATE, "main", ".private", RepositoryNotFoundError),
    ],
)
def test_what_is_absent_raises_the_clients_own_errors(
    endpoint: str, tmp_path: Path, repository: str, revision: str, file: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        hf_hub_download(repository, file, revision=revision, endpoint=endpoint, cache_dir=tmp_path / "c", token=False)


@pytest.mark.parametrize("path", ["../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd"])
def test_no_path_leads_out_of_the_repository(endpoint: str, path: str) -> None:
    answer = httpx.get(f"{endpoint}/{PUBLIC}/resolve/main/{path}")
    assert answer.status_code == 404
