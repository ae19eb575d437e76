"""Makes Mooncake loadable on a machine without libibverbs: see `verbs.c`. Elsewhere the real library is used."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
SONAME = "libibverbs.so.1"


@functools.cache
def find_verbs() -> Path | None:
    """The folder with a stand-in for libibverbs, built where there is none; None where this machine has the library."""
    try:
        ctypes.CDLL(SONAME)
    except OSError:
        return _build()
    return None


def load_verbs() -> None:
    """Into this process, so that Mooncake's modules can be imported in it."""
    folder = find_verbs()
    if folder is not None:
        ctypes.CDLL(str(folder / SONAME), mode=ctypes.RTLD_GLOBAL)


def plan_environment() -> dict[str, str]:
    """This process's environment, for one that loads Mooncake."""
    folder = find_verbs()
    if folder is None:
        return dict(os.environ)
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)}


def _build() -> Path:
    """Once for all test processes of this tree. Raises CalledProcessError with the compiler's words."""
    sources = [_HERE / "verbs.c", _HERE / "verbs.map"]
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"tandem-verbs-{os.getuid()}-{key}"
    target = folder / SONAME
    if target.is_file():
        return folder
    folder.mkdir(mode=0o700, exist_ok=True)
    fresh = folder / f"{os.getpid()}.so"
    options = ["-x", "c", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{SONAME}", f"-Wl,--version-script={sources[1]}"]
    compiler = os.environ.get("CXX", "g++")  # as `make native`
    subprocess.run([compiler, *options, "-o", str(fresh), str(sources[0])], check=True, timeout=60)
    os.rename(fresh, target)
    return folder
