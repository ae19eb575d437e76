"""`hf://ORG/REPO`: download from a Hugging Face hub into a cache folder that workers may share.

    CACHE/hub/ORG--REPO/COMMIT/      the files, their manifest once all of them are verified
    CACHE/hub/ORG--REPO/COMMIT.FORM/ the same packed, where that is asked for
    CACHE/hub/ORG--REPO/refs/NAME    the commit that a branch or tag last named

A download is complete when the manifest exists; it is renamed into place last. Files keep what was downloaded of them,
so whoever takes over from a killed process goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem_api.launch import ModelSource, PackedForm

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.files import is_inner_path
from tandem_worker.model.sources import lease
from tandem_worker.model.sources.digest import MANIFEST
from tandem_worker.model.sources.selection import RepositoryFile, select_files

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from tandem_worker.host.files.exchange import FileExchange

logger = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Git's SHA-1, or the SHA-256 of newer repositories."""
_GIT_BLOB = re.compile(r"[0-9a-f]{40}")
ORIGINAL = ".original"
"""Within the folder of a packed copy: the download, until the copy is complete."""
_INTERNAL = Path(".cache", "huggingface", "download")
"""The folder where huggingface_hub keeps partial files inside a download folder."""
_MAX_ATTEMPTS = 2
_LOG_SECONDS = 5.0


def resolve_hub(source: ModelSource, token: str | None = None, exchange: FileExchange | None = None) -> Path:
    """The folder of the revision's commit, complete and verified; downloaded unless it is there.

    Raises StartupError: ModelNotFound, RevisionNotFound, AccessDenied, NoWeights, HubUnreachable, HubAnswerInvalid,
    DownloadCorrupt, WeightsCorrupt, DiskFull, CacheNotWritable, CacheInvalid.
    """
    from huggingface_hub import HfApi

    repository = source.uri.removeprefix("hf://").strip("/")
    home = Path(source.cache_dir, "hub", repository.replace("/", "--"))
    api = HfApi(endpoint=source.hub_endpoint, token=token or False)
    with _explaining(repository, source.revision, token, api.endpoint):
        commit = _resolve_commit(api, repository, source.revision, home, source.pack)
        folder = _folder(home, commit, source.pack)
        if not _is_complete(folder):
            _download_once(api, repository, commit, folder, exchange, source.pack)
        if source.pack is not None:
            _forget_original(folder)
        elif exchange is not None:
            from tandem_worker.model.sources.swarm import shared

            shared.offer_folder(exchange, folder, repository, commit)
        _remember(home, source.revision, commit)
    return folder


def _folder(home: Path, commit: str, pack: PackedForm | None) -> Path:
    return home / (commit if pack is None else f"{commit}.{pack.lower()}")


def _forget_original(folder: Path) -> None:
    """Remove the download of which `folder` is the packed copy, complete."""
    shutil.rmtree(folder / ORIGINAL, ignore_errors=True)  # a read-only cache serves as well


def _is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _resolve_commit(api: HfApi, repository: str, revision: str, home: Path, pack: PackedForm | None) -> str:
    """The commit of `revision`. Where the hub is away, what it last was, if that has been downloaded."""
    if _COMMIT.fullmatch(revision) and _is_complete(_folder(home, revision, pack)):
        return revision
    try:
        commit: object = api.model_info(repository, revision=revision, timeout=30).sha
    except Exception as error:
        known = _read_ref(home, revision)
        if known is None or not _is_complete(_folder(home, known, pack)) or not _is_outage(error):
            raise
        logger.warning("the hub cannot be reached, using the downloaded %s of %s", known[:12], repository)
        return known
    if commit is None:
        raise StartupError("RevisionNotFound", f"The hub names no commit for revision {revision!r} of {repository}.")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise StartupError(
            "HubAnswerInvalid",
            f"The hub {api.endpoint} says that revision {revision!r} of {repository} is commit {_shorten(commit)}, "
            "which is not the 40 or 64 hexadecimal digits of a commit: is it a Hugging Face-compatible hub?",
        )
    return commit


def _ref_path(home: Path, revision: str) -> Path:
    return home / "refs" / revision.replace("/", "%")


def _read_ref(home: Path, revision: str) -> str | None:
    try:
        commit = _ref_path(home, revision).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _remember(home: Path, revision: str, commit: str) -> None:
    if revision != commit and _read_ref(home, revision) != commit:
        with contextlib.suppress(OSError):  # a read-only cache serves as well
            path = _ref_path(home, revision)
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(path, commit)


def _download_once(
    api: HfApi, repository: str, commit: str, folder: Path, exchange: FileExchange | None, pack: PackedForm | None
) -> None:
    """Download, and pack where that is asked for, or wait until another worker has."""
    folder.mkdir(parents=True, exist_ok=True)
    owner = f"{socket.gethostname()}/{os.getpid()}"
    held = lease.acquire(folder, owner, is_complete=lambda: _is_complete(folder), on_wait=_WaitLog(repository))
    if held is None:
        return
    try:
        started = time.monotonic()
        if pack is None:
            total = _download(api, repository, commit, folder, held, exchange)
        else:
            total = _download_packed(api, repository, commit, folder, held, pack)
        seconds = max(time.monotonic() - started, 1e-3)
        logger.info("downloaded %s: %.1f MB in %.1f s", repository, total / 1e6, seconds)
    finally:
        held.release()


def _download_packed(
    api: HfApi, repository: str, commit: str, folder: Path, held: lease.Lease, pack: PackedForm
) -> int:
    """The bytes that were downloaded. A plain copy that others may use is packed too, and stays."""
    from tandem_worker.model.sources import packed

    plain, total = folder.with_name(commit), 0
    if not _is_complete(plain):
        plain = folder / ORIGINAL
        if not _is_complete(plain):
            plain.mkdir(exist_ok=True)
            total = _download(api, repository, commit, plain, held, None)
    manifest = json.loads((plain / MANIFEST).read_text())
    packed.pack_download(plain, folder, pack, manifest["files"], repository)
    if held.lost.is_set():
        raise StartupError("HubUnreachable", f"Another worker took over the packing of {repository}.")
    _write_atomically(folder / MANIFEST, json.dumps({**manifest, "packed": pack}))
    return total


def _download(
    api: HfApi, repository: str, commit: str, folder: Path, held: lease.Lease, exchange: FileExchange | None
) -> int:
    files = select_files(_list_files(api, repository, commit), repository)
    for file in files:
        _check_file(file, repository, folder)
    total = sum(file.size for file in files)
    _check_room(folder, files)
    logger.info("downloading %s at %s: %d files, %.1f MB", repository, commit[:12], len(files), total / 1e6)
    progress = _ProgressLog(repository, total)

    def check() -> None:
        if held.lost.is_set():
            raise StartupError("HubUnreachable", f"Another worker took over the download of {repository}.")

    left, done = files, 0
    if exchange is not None:  # else nothing of it is imported
        from tandem_worker.model.sources.swarm import shared
        from tandem_worker.model.sources.swarm.hub import HubRanges

        left = shared.download(
            files, folder, exchange, HubRanges(api, repository, commit),
            verify=_verify, on_progress=progress.of_file(0), check=check,
        )  # fmt: skip
        done = total - sum(file.size for file in left)
    for file in left:
        _fetch(api, repository, commit, folder, file, progress.of_file(done))
        done += file.size
        check()
    digests = {file.path: file.sha256 or file.git_blob or str(file.size) for file in files}
    _write_atomically(folder / MANIFEST, json.dumps({"repository": repository, "commit": commit, "files": digests}))
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return total


def _list_files(api: HfApi, repository: str, commit: str) -> list[RepositoryFile]:
    from huggingface_hub.hf_api import RepoFile

    return [
        RepositoryFile(
            path=entry.path,
            size=entry.size,
            sha256=entry.lfs.sha256 if entry.lfs else None,
            git_blob=None if entry.lfs else entry.blob_id,
        )
        for entry in api.list_repo_tree(repository, recursive=True, revision=commit)
        if isinstance(entry, RepoFile)
    ]


def _check_file(file: RepositoryFile, repository: str, folder: Path) -> None:
    """What the hub announces becomes a path and a number of bytes here. Raises StartupError where it must not."""
    if not is_inner_path(file.path):
        raise StartupError(
            "HubAnswerInvalid",
            f"The hub lists {_shorten(file.path)} in {repository}, which is no path of a file in it.",
        )
    size: object = file.size
    if not isinstance(size, int) or size < 0:
        raise StartupError("HubAnswerInvalid", f"The hub says that {file.path} of {repository} has {size!r} bytes.")
    if not (folder / file.path).resolve().is_relative_to(folder.resolve()):
        raise StartupError(
            "CacheInvalid",
            f"In the model cache {file.path} of {repository} is a link that leads out of its folder {folder}: "
            "delete the link.",
        )


def _shorten(value: object) -> str:
    return repr(value)[:100]


def _check_room(folder: Path, files: list[RepositoryFile]) -> None:
    found = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    # Files in parts are as long as they will be from the beginning: what they have is what is allocated.
    present = sum(min(s.st_size, 512 * s.st_blocks) if path.suffix == ".part" else s.st_size for path, s in found)
    missing = sum(file.size for file in files) - present
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise StartupError(
            "DiskFull",
            f"The download needs {missing / 1e9:.2f} GB more, but the model cache has {free / 1e9:.2f} GB free: "
            "give spec.model.cache a larger claim, or the pod more ephemeral storage.",
        )


def _fetch(
    api: HfApi, repository: str, commit: str, folder: Path, file: RepositoryFile, progress: Callable[[int], None]
) -> None:
    """One file, verified. What fails verification is downloaded from the start once more."""
    target = folder / file.path
    for _ in range(_MAX_ATTEMPTS):
        with _watching(folder, target, progress), contextlib.suppress(_ShortDownloadError):
            _call_library(api, repository, commit, folder, file)
        if target.is_file() and _verify(target, file):
            return
        logger.warning("%s of %s is damaged, downloading it again", file.path, repository)
        target.unlink(missing_ok=True)
        shutil.rmtree(folder / _INTERNAL, ignore_errors=True)
    raise StartupError(
        "DownloadCorrupt",
        f"{file.path} of {repository} does not have the size or the digest that the hub announces, "
        f"{_MAX_ATTEMPTS} times in a row.",
    )


class _ShortDownloadError(Exception):
    """The library noticed a wrong size."""


def _call_library(api: HfApi, repository: str, commit: str, folder: Path, file: RepositoryFile) -> None:
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(
            repository, file.path, revision=commit, local_dir=folder, endpoint=api.endpoint, token=api.token
        )
    except OSError as error:
        if "Consistency check failed" in str(error):
            raise _ShortDownloadError from error
        raise


def _verify(path: Path, file: RepositoryFile) -> bool:
    if path.stat().st_size != file.size:
        return False
    with path.open("rb") as source:
        if file.sha256 is not None:
            return hashlib.file_digest(source, "sha256").hexdigest() == file.sha256
        if file.git_blob is None or not _GIT_BLOB.fullmatch(file.git_blob):
            return True
        blob = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
        blob.update(source.read())
        return blob.hexdigest() == file.git_blob


def _write_atomically(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


class _ProgressLog:
    """A line every few seconds: people watch the pod's log while gigabytes arrive."""

    def __init__(self, repository: str, total: int) -> None:
        self._repository, self._total = repository, total
        self._started = self._logged = time.monotonic()

    def of_file(self, before: int) -> Callable[[int], None]:
        return lambda present: self._report(before + present)

    def _report(self, present: int) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            logger.info(
                "downloading %s: %.0f of %.0f MB after %.0f s",
                self._repository, present / 1e6, self._total / 1e6, now - self._started,
            )  # fmt: skip


class _WaitLog:
    def __init__(self, repository: str) -> None:
        self._repository = repository
        self._logged = 0.0

    def __call__(self, holder: str) -> None:
        now = time.monotonic()
        if not self._logged or now - self._logged > 10 * _LOG_SECONDS:
            self._logged = now
            logger.info("waiting for %s, which downloads %s", holder, self._repository)


@contextlib.contextmanager
def _watching(folder: Path, target: Path, progress: Callable[[int], None]) -> Iterator[None]:
    """Call `progress` with the bytes of `target` that are on disk, every second."""
    import threading

    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(1.0):
            partial = (folder / _INTERNAL).glob("*.incomplete")
            with contextlib.suppress(OSError):
                progress(target.stat().st_size if target.exists() else sum(p.stat().st_size for p in partial))

    thread = threading.Thread(target=watch, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _is_outage(error: Exception) -> bool:
    """The hub could not be asked, as opposed to: it said no."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code in {408, 429, 500, 502, 503, 504}
    # The library's HTTP client changes between its releases: what it raises is known by its package.
    is_client_error = type(error).__module__.partition(".")[0] in {"httpx", "httpx2", "httpcore", "httpcore2"}
    return is_client_error or isinstance(
        error, LocalEntryNotFoundError | OfflineModeIsEnabled | ConnectionError | TimeoutError
    )


@contextlib.contextmanager
def _explaining(repository: str, revision: str, token: str | None, endpoint: str) -> Iterator[None]:
    """Translate what the library and the file system raise into a StartupError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except StartupError:
        raise
    except HfHubHTTPError as error:
        raise _explain_answer(error, repository, revision, token, endpoint) from error
    except HFValidationError as error:
        raise StartupError("ModelNotFound", f"{repository!r} is not the name of a repository: {error}") from error
    except Exception as error:
        if _is_outage(error):
            raise StartupError(
                "HubUnreachable", f"The hub {endpoint} cannot be reached for {repository}: {error}"
            ) from error
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StartupError("DiskFull", f"The model cache is full while downloading {repository}.") from error
        if isinstance(error, OSError) and error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise StartupError("CacheNotWritable", f"The model cache cannot be written to: {error}") from error
        raise


def _explain_answer(error: Any, repository: str, revision: str, token: str | None, endpoint: str) -> StartupError:
    from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

    status = error.response.status_code if error.response is not None else 0
    if isinstance(error, RevisionNotFoundError):
        return StartupError("RevisionNotFound", f"{repository} has no revision {revision!r} at {endpoint}.")
    if isinstance(error, GatedRepoError):
        return StartupError(
            "AccessDenied",
            f"{repository} is gated: accept its terms at {endpoint} and give an access token in spec.model.secretRef.",
        )
    if status in {401, 403}:
        means = "the token of spec.model.secretRef does not open it" if token else "no token was given"
        return StartupError(
            "AccessDenied",
            f"{endpoint} denies access to {repository}: it is private or does not exist, and {means}. "
            "Check spec.model.uri and spec.model.secretRef.",
        )
    if status == 404:
        return StartupError("ModelNotFound", f"There is no repository {repository} at {endpoint}.")
    return StartupError("HubUnreachable", f"The hub {endpoint} answered with status {status} for {repository}.")
