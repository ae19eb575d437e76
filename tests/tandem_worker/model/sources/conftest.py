"""A real HTTP hub on loopback: the project's model mirror, with faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tandem_api.launch import ModelSource

from e2e.mirror.server import HubHandler, MirrorServer


class FaultyHandler(HubHandler):
    """Notes downloads; the first `server.corruptions` downloads of the file `server.corrupt` arrive damaged.

    `server.lies` are fields that every answer to a question about a revision has instead of the true ones, and
    `server.listed` are entries that its tree has besides the true ones.
    """

    server: Any

    def _info(self, repository: str, commit: str) -> dict[str, object]:
        return super()._info(repository, commit) | self.server.lies

    def _tree(self, repository: str) -> list[dict[str, object]]:
        return [*super()._tree(repository), *self.server.listed]

    def do_GET(self) -> None:
        if "/resolve/" not in self.path:
            super().do_GET()
            return
        name = self.path.rpartition("/")[2]
        first_byte = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        self.server.downloads.append((name, int(first_byte)))
        self.server.gate.wait(60)
        marker = self.server.root / "org" / "model" / ".corrupt"
        if name == self.server.corrupt and self.server.corruptions > 0:
            self.server.corruptions -= 1
            marker.touch()
        try:
            super().do_GET()
        finally:
            marker.unlink(missing_ok=True)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Hub(MirrorServer):
    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), root)
        self.RequestHandlerClass = FaultyHandler
        self.root = root
        self.downloads: list[tuple[str, int]] = []
        self.corrupt, self.corruptions = "", 0
        self.lies: dict[str, object] = {}
        self.listed: list[dict[str, object]] = []
        self.gate = threading.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, repository: str, **files: bytes) -> None:
        folder = self.root / repository
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_bytes(content)
        self.repositories._digests.clear()

    def source(self, cache: Path, repository: str = "org/model", revision: str = "main") -> ModelSource:
        return ModelSource(uri=f"hf://{repository}", revision=revision, cache_dir=str(cache), hub_endpoint=self.url)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    server = Hub(tmp_path / "mirror")
    server.add(
        "org/model",
        config__json=b"{}",
        tokenizer__json=b"[]",
        model__safetensors=bytes(range(256)) * 4000,
        pytorch_model__bin=b"x" * 1000,
        README__md=b"text",
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    thread.join()
    server.server_close()
