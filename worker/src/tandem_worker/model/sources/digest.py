"""A digest that names a model by every byte that may be read of it, so that workers with different ones never exchange
key-value blocks.

It is an identity, not a proof against a forger: the workers of a model that would mix blocks are one operator's, and
whoever may write their files needs no collision. So the hash is the fastest there is (XXH3, 128 bits), and it runs on
threads of its own while the weights load: both read the same pages of the same files. A manifest of a download is not
trusted in its place, for it tells what once arrived and not what lies there now.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from xxhash import xxh3_128

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.files import find_gguf, find_safetensors

logger = logging.getLogger(__name__)

MANIFEST = ".tandem-manifest.json"
"""Beside a completed download: `{file: sha256 or git blob id}` as the hub announced and as was verified."""
_FORMAT = "tandem-model-digest 2"
"""Part of what is hashed: another way to compute digests makes other digests."""
_SEGMENT = 256 << 20
"""Bytes that one thread hashes at a stretch, so that one large file keeps all of them busy. Part of the format."""
_CHUNK, _LONG_CHUNK = 4 << 20, 32 << 20
"""Bytes that are read at a stretch, and those of a model of several GB: the interpreter, which imports hold beside it,
is waited for twice for each."""
_LONG = 4 << 30
"""Bytes of a model from which on chunks are long."""
_MAX_THREADS = 4
"""A thread hashes some 4 GB/s of what is in the page cache; more of them than storage feeds would only disturb."""
_WEIGHTS = frozenset({".safetensors", ".gguf"})
_UNREAD = frozenset(
    {
        ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".npz", ".tflite",
        ".md", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".mp4",
    }
)  # fmt: skip
"""Suffixes of weights in forms that are never loaded, and of what is for people."""


def has_come_since(path: Path, since: float) -> bool:
    """Whether the download in the folder `path` was completed after `since`, in Unix seconds; False where none was."""
    try:
        return (path / MANIFEST).stat().st_mtime >= since
    except OSError:
        return False


class ModelDigest:
    """The digest of the model at `path`, a folder or a file: hashing begins at once, on daemon threads.

    Two workers that read the same files get the same digest wherever those lie.
    """

    def __init__(self, path: Path, num_threads: int = _MAX_THREADS) -> None:
        """Raises StartupError when the model's files cannot be told."""
        self._started = time.monotonic()
        try:
            self._files = [(name, file, file.stat().st_size) for name, file in list_files(path)]
        except OSError as error:
            raise _unreadable(error) from error
        self._chunk = _LONG_CHUNK if sum(size for _, _, size in self._files) >= _LONG else _CHUNK
        self._segments: dict[tuple[str, int], bytes] = {}
        self._error: OSError | None = None
        self._queue: queue.SimpleQueue[tuple[str, Path, int] | None] = queue.SimpleQueue()
        for name, file, size in self._files:
            for start in range(0, max(size, 1), _SEGMENT):
                self._queue.put((name, file, start))
        self._threads = [
            threading.Thread(target=self._run, name=f"digest-{number}", daemon=True)
            for number in range(max(1, min(num_threads, self._queue.qsize())))
        ]
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.start()

    def result(self) -> str:
        """32 hexadecimal digits; waits until they are known. Raises StartupError when a file cannot be read."""
        waited = time.monotonic()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise _unreadable(self._error) from self._error
        total = sum(size for _, _, size in self._files)
        now = time.monotonic()
        logger.info(
            "the model's digest covers %d files, %.1f MB: %.1f s, %.1f s of them waited for",
            len(self._files), total / 1e6, now - self._started, now - waited,
        )  # fmt: skip
        whole = hashlib.sha256(_FORMAT.encode())
        for name, _, size in self._files:
            whole.update(f"\n{len(name.encode())} {name} {size} ".encode())
            for start in range(0, max(size, 1), _SEGMENT):
                whole.update(self._segments[name, start])
        return whole.hexdigest()[:32]

    def _run(self) -> None:
        buffer = bytearray(self._chunk)
        while (work := self._queue.get()) is not None and self._error is None:
            name, file, start = work
            try:
                self._segments[name, start] = _hash_segment(file, start, buffer)
            except OSError as error:
                self._error = error


def model_digest(path: Path) -> str:
    """`ModelDigest`, waited for."""
    return ModelDigest(path).result()


def await_digests(hashing: Sequence[ModelDigest]) -> str:
    """The model's digest; with a draft head, whose keys and values are in blocks too, that of both."""
    digests = [each.result() for each in hashing]
    return digests[0] if len(digests) == 1 else combine_digests(digests)


def combine_digests(digests: Sequence[str]) -> str:
    """One digest, 32 hexadecimal digits, for what several of them name together, in this order."""
    return hashlib.sha256("\n".join([_FORMAT, *digests]).encode()).hexdigest()[:32]


def list_files(path: Path) -> list[tuple[str, Path]]:
    """Names and paths of what may be read of the model at `path`, sorted: everything but what certainly is not.

    Of folders inside, that is modules' configurations and chat templates, and weights that the index finds there.
    """
    if path.is_file():
        return [(path.name, path)]
    gguf = find_gguf(path)
    weights = find_safetensors(path) if gguf is None else [gguf]
    side = [file for file in path.iterdir() if file.is_file() and _may_be_read(file)]
    inside = [*path.glob("*/config.json"), *path.glob("*/*.jinja")]
    return sorted((file.relative_to(path).as_posix(), file) for file in {*weights, *side, *inside})


def _may_be_read(file: Path) -> bool:
    """Whether a file beside the weights may be read when the model is loaded."""
    hidden = file.name.startswith((".", "lease."))
    return not hidden and file.suffix.lower() not in _UNREAD | _WEIGHTS


def _hash_segment(file: Path, start: int, buffer: bytearray) -> bytes:
    digest = xxh3_128()
    view = memoryview(buffer)
    left = _SEGMENT
    with file.open("rb", buffering=0) as source:
        source.seek(start)
        while left and (count := source.readinto(view[: min(left, len(view))])):
            digest.update(view[:count])
            left -= count
    return digest.digest()


def _unreadable(error: OSError) -> StartupError:
    return StartupError("WeightsUnreadable", f"A file of the model cannot be read: {error}.")
