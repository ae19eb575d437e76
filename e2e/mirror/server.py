"""A Hugging Face-compatible hub that serves one folder of repositories: what `huggingface_hub` asks for, nothing more.

    ROOT/ORG/REPOSITORY/file…           one repository, one revision
    ROOT/ORG/REPOSITORY/.private        its content is the bearer token that opens it
    ROOT/ORG/REPOSITORY/.corrupt        its files arrive with a wrong first byte, under the right digest (for tests)

Endpoints: model info and file tree of a revision, and HEAD/GET of a file with ETag (its sha256), commit and Range.
For tests, `MIRROR_DROP_AFTER=BYTES` cuts the first download of each file after that many bytes, and
`POST /move/ORG/REPOSITORY` moves the repository's branch to a new commit with the same files; old commits stay.

Standard library only: it runs in an image that has Python and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections import Counter
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

REVISIONS = {"main"}
MARKERS = {".private", ".corrupt"}
CHUNK = 1 << 20
MOST_MOVES = 64
INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
MOVE = re.compile(r"/move/([^/]+/[^/]+)")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class HubError(Exception):
    """An answer that is an error: status, the code that huggingface_hub maps to an exception, a sentence."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Repositories:
    """The folder. Digests are computed once a file."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._digests: dict[Path, str] = {}
        self._moves: Counter[str] = Counter()
        """How often the branch of each repository has moved."""

    def files(self, repository: str) -> list[Path]:
        folder = self.root / repository
        return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in MARKERS)

    def commits(self, repository: str) -> list[str]:
        """All that the branch is, was or can become, of forty hexadecimal digits each, which change when any file does.
        Known beforehand, so that a mirror that starts anew still has what it named before."""
        folder = self.root / repository
        names = "".join(f"{path.relative_to(folder)} {self.digest(path)}\n" for path in self.files(repository))
        texts = [names + "moved\n" * count for count in range(MOST_MOVES + 1)]
        return [hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for text in texts]

    def branch(self, repository: str) -> str:
        """The commit that the branch is now."""
        return self.commits(repository)[self._moves[repository]]

    def move(self, repository: str) -> str:
        """The branch is a new commit from now on."""
        if ".." in Path(repository).parts or not (self.root / repository).is_dir():
            raise HubError(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
        if self._moves[repository] == MOST_MOVES:
            raise HubError(HTTPStatus.CONFLICT, "TooManyMoves", f"a branch moves {MOST_MOVES} times at most")
        self._moves[repository] += 1
        return self.branch(repository)

    def digest(self, path: Path) -> str:
        if path not in self._digests:
            with path.open("rb") as source:
                self._digests[path] = hashlib.file_digest(source, "sha256").hexdigest()
        return self._digests[path]

    def check(self, repository: str, revision: str | None, authorization: str | None) -> str:
        """The commit that `revision` names. Raises Refusal as the public hub would."""
        folder = self.root / repository
        if ".." in folder.parts or not folder.is_dir():
            raise HubError(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
        secret = folder / ".private"
        if secret.exists() and authorization != f"Bearer {secret.read_text().strip()}":
            raise HubError(HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Invalid username or password.")
        if revision in self.commits(repository):
            return revision
        if revision is not None and revision not in REVISIONS:
            raise HubError(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.branch(repository)

    def is_corrupt(self, repository: str) -> bool:
        return (self.root / repository / ".corrupt").exists()

    def find(self, repository: str, name: str) -> Path:
        path = self.root / repository / name
        if ".." in path.parts or not path.is_file() or path.name in MARKERS:
            raise HubError(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found")
        return path


class HubHandler(BaseHTTPRequestHandler):
    """One request. `repositories`, `drop_after` and `dropped` belong to the server object."""

    protocol_version = "HTTP/1.1"

    @property
    def mirror(self) -> MirrorServer:
        assert isinstance(self.server, MirrorServer)
        return self.server

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_POST(self) -> None:
        self._answer(body=True, moves=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool, moves: bool = False) -> None:
        path = unquote(urlsplit(self.path).path)
        try:
            if moves:
                self._move(path)
            else:
                self._route(path, body=body)
        except HubError as refusal:
            self._json({"error": str(refusal)}, refusal.status, {"X-Error-Code": refusal.code}, body=body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client went away: nobody is left to tell

    def _route(self, path: str, *, body: bool) -> None:
        if path in {"/healthz", "/readyz"}:
            self._json({"status": "ok"}, body=body)
        elif match := TREE.fullmatch(path):
            self._allowed(match[1], match[2])
            self._json(self._tree(match[1]), body=body)
        elif match := INFO.fullmatch(path):
            commit = self._allowed(match[1], match[2])
            self._json(self._info(match[1], commit), body=body)
        elif match := FILE.fullmatch(path):
            commit = self._allowed(match[1], match[2])
            repositories = self.mirror.repositories
            corrupt = repositories.is_corrupt(match[1])
            self._file(repositories.find(match[1], match[3]), commit, body=body, corrupt=corrupt)
        else:
            raise HubError(HTTPStatus.NOT_FOUND, "EntryNotFound", "Not found")

    def _move(self, path: str) -> None:
        if (match := MOVE.fullmatch(path)) is None:
            raise HubError(HTTPStatus.NOT_FOUND, "EntryNotFound", "Not found")
        self._json({"sha": self.mirror.repositories.move(match[1])}, body=True)

    def _allowed(self, repository: str, revision: str | None) -> str:
        return self.mirror.repositories.check(repository, revision, self.headers.get("Authorization"))

    def _info(self, repository: str, commit: str) -> dict[str, object]:
        folder = self.mirror.repositories.root / repository
        siblings = [{"rfilename": str(p.relative_to(folder))} for p in self.mirror.repositories.files(repository)]
        private = (folder / ".private").exists()
        return {"_id": commit[:24], "id": repository, "sha": commit, "private": private, "gated": False, "tags": [],
                "siblings": siblings}  # fmt: skip

    def _tree(self, repository: str) -> list[dict[str, object]]:
        """As the hub lists it: what is in folders only where `recursive` asks for it."""
        repositories = self.mirror.repositories
        folder = repositories.root / repository
        recursive = "true" in parse_qs(urlsplit(self.path).query.lower()).get("recursive", [])
        return [
            {
                "type": "file",
                "path": str(path.relative_to(folder)),
                "size": path.stat().st_size,
                "oid": repositories.digest(path)[:40],
                "lfs": {"oid": repositories.digest(path), "size": path.stat().st_size, "pointerSize": 134},
            }
            for path in repositories.files(repository)
            if recursive or path.parent == folder
        ]

    def _file(self, path: Path, commit: str, *, body: bool, corrupt: bool) -> None:
        size = path.stat().st_size
        start, end = 0, size
        if match := RANGE.fullmatch(self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or size) + 1, size) if match[2] else size
            if start >= size:
                self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        digest = self.mirror.repositories.digest(path)
        self.send_response(HTTPStatus.PARTIAL_CONTENT if match else HTTPStatus.OK)
        if match:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        for name, value in {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(end - start),
            "Accept-Ranges": "bytes",
            "ETag": f'"{digest}"',
            "X-Linked-ETag": f'"{digest}"',
            "X-Linked-Size": str(size),
            "X-Repo-Commit": commit,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self._send(path, start, end, corrupt=corrupt)

    def _send(self, path: Path, start: int, end: int, *, corrupt: bool) -> None:
        limit = self.mirror.drop_after
        cut = limit is not None and path not in self.mirror.dropped
        if cut:
            self.mirror.dropped.add(path)
            end = min(end, start + (limit or 0))
        with path.open("rb") as source:
            source.seek(start)
            while start < end and (piece := source.read(min(CHUNK, end - start))):
                if corrupt and start == 0:
                    piece = bytes([piece[0] ^ 0xFF]) + piece[1:]
                self.wfile.write(piece)
                start += len(piece)
        if cut:
            self.close_connection = True

    def _json(
        self, document: object, status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None, *, body: bool
    ) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


class MirrorServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], root: Path, drop_after: int | None = None) -> None:
        super().__init__(address, HubHandler)
        self.repositories = Repositories(root)
        self.drop_after = drop_after
        self.dropped: set[Path] = set()


def main() -> None:
    root = Path(os.environ.get("MIRROR_ROOT", "/models"))
    port = int(os.environ.get("LISTEN_PORT", "8080"))
    drop = os.environ.get("MIRROR_DROP_AFTER")
    print(f"serving {root} on port {port}", file=sys.stderr)
    MirrorServer(("0.0.0.0", port), root, int(drop) if drop else None).serve_forever()


if __name__ == "__main__":
    main()
