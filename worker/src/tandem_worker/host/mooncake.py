"""Mooncake's package: where its programs are, and why it cannot be loaded here, in words. Loads none of it."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import sys
from pathlib import Path

_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Shared libraries that the wheel does not bring along, and the Debian packages that do."""


def find_mooncake_obstacle() -> str | None:
    """Why Mooncake cannot be loaded by this process, and what to do about it; None: it can.

    Looks for its package and for the libraries that it needs, which are loaded where they are found.
    """
    if find_mooncake_folder() is None:
        if sys.platform != "linux" or platform.machine() != "x86_64":
            return f"Mooncake's package exists for Linux on x86-64; this is {sys.platform} on {platform.machine()}"
        return "Mooncake is not installed: install tandem-worker[mooncake], which the project's worker image has"
    missing = [name for name in _LIBRARIES if not _is_loadable(name)]
    if missing:
        packages = " ".join(_LIBRARIES[name] for name in missing)
        return f"Mooncake needs {', '.join(missing)}, which this machine lacks: apt-get install {packages}"
    return None


def find_mooncake_folder() -> Path | None:
    """The folder of its modules and programs; None where it is not installed."""
    spec = importlib.util.find_spec("mooncake")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((Path(each) for each in locations if (Path(each) / "mooncake_master").is_file()), None)


def find_mooncake_program(name: str) -> Path:
    """`mooncake_master` or `mooncake_client`. Raises FileNotFoundError with what to install."""
    folder = find_mooncake_folder()
    if folder is None or not (folder / name).is_file():
        raise FileNotFoundError(f"{name} is not here: {find_mooncake_obstacle() or 'its package lacks the program'}")
    return folder / name


def _is_loadable(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
