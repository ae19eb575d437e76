"""Triton kernels as the compiler left them, from one start for the next.

Triton keeps what it compiled in a folder, one below it for each kernel and specialization, named after everything that
it depends on. That folder is the container's own; what is in it goes into one entry of the store once a worker serves,
and comes back, every byte verified, before the next start needs it. A damaged copy is never loaded, but compiled anew.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import secrets
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_hexdigest

from tandem_worker.model.prepared.store import PreparedStore

logger = logging.getLogger(__name__)

LAYOUT = 1
_PLACE = re.compile(r"[A-Za-z0-9_-]{1,128}/[A-Za-z0-9_.+-]{1,200}")
"""Place of a file: a folder of Triton's, and a name in it."""
_UNFINISHED = ".tandem-"


def describe_sources(*folders: Path) -> str:
    """Digest of the Python files in folders, names included: other sources, other kernels."""
    digest = xxh3_64()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def open_prepared_kernels(store: PreparedStore) -> PreparedKernels:
    """Those of this process's GPU. Imports Triton's package alone."""
    import torch
    import triton

    package = Path(__file__).parents[2]
    facts = {
        "gpu": f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}",
        "driver": _read_driver(),
        "triton": triton.__version__,
        "sources": describe_sources(package / "kernels", package / "model" / "backends" / "triton"),
    }
    return PreparedKernels(store, Path(os.environ["TRITON_CACHE_DIR"]), facts)


def name_compiler() -> None:
    """Have Triton compute the name of its compiler, which it keeps: its library is read for that when the first kernel
    is looked for, 0.4 s. Any thread."""
    from triton.runtime import cache

    getattr(cache, "triton_key", lambda: None)()


def _read_driver() -> str:
    """The first line that the kernel module tells of itself; nothing where it is hidden from the container."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""


class PreparedKernels:
    """The kernels of one kind of device. `restore` comes before the first is launched, `save` when all are there."""

    def __init__(self, store: PreparedStore, folder: Path, facts: Mapping[str, str]) -> None:
        """`folder` is Triton's. `facts` are what kernels depend on beyond what Triton's own names say, or what else
        should keep them apart: GPU, driver, Triton's version, sources."""
        named = json.dumps({"layout": LAYOUT, **facts}, sort_keys=True)
        self.name = f"kernels-{xxh3_64_hexdigest(named.encode())}"
        self._store, self._folder = store, folder
        self.restored: frozenset[str] = frozenset()
        """Places of the files that the store has and that are back, or that came from here."""

    def restore(self) -> int:
        """Put what an earlier start compiled where Triton looks for it; the number of files, 0 where there are none."""
        payload = self._store.read(self.name)
        if payload is None:
            return 0
        try:
            self.restored = frozenset(self._unpack(payload))
        except (tarfile.TarError, EOFError, OSError) as error:
            logger.warning("compiled kernels cannot be put back, so they are compiled anew: %s", error)
            return 0
        logger.info("compiled kernels are put back", extra={"files": len(self.restored), "bytes": len(payload)})
        return len(self.restored)

    def save(self) -> bool:
        """Keep what is in Triton's folder, unless it all came from there; whether the store has it now."""
        found = dict(self._files())
        if not found or found.keys() <= self.restored:
            return bool(found)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for place, file in found.items():
                try:
                    content = file.read_bytes()
                except FileNotFoundError:  # Triton replaced or removed it meanwhile
                    continue
                entry = tarfile.TarInfo(place)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        if not self._store.write(self.name, packed.getvalue()):
            return False
        self.restored = frozenset(found)
        logger.info("compiled kernels are kept", extra={"files": len(found), "bytes": packed.tell()})
        return True

    def _files(self) -> Iterator[tuple[str, Path]]:
        if not self._folder.is_dir():
            return
        for file in sorted(self._folder.glob("*/*")):
            place = file.relative_to(self._folder).as_posix()
            is_whole = not file.name.startswith(_UNFINISHED) and not file.is_symlink() and file.is_file()
            if is_whole and _PLACE.fullmatch(place):
                yield place, file

    def _unpack(self, payload: bytes) -> Iterator[str]:
        """The files, each complete or not there at all: other ranks of this container may be launching kernels."""
        with tarfile.open(fileobj=io.BytesIO(payload), mode="r:") as archive:
            for entry in archive:
                content = archive.extractfile(entry)
                if content is None or not _PLACE.fullmatch(entry.name):
                    raise tarfile.TarError(f"{entry.name!r} is no place of a kernel")
                target = self._folder / entry.name
                target.parent.mkdir(parents=True, exist_ok=True)
                unfinished = target.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
                try:
                    unfinished.write_bytes(content.read())
                    unfinished.chmod(0o755)  # launchers are libraries
                    os.replace(unfinished, target)
                finally:
                    unfinished.unlink(missing_ok=True)
                yield entry.name
