"""SIGTERM while a worker starts."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

LOCKED = """
import ctypes, pathlib, sys
if "tandem_worker" in sys.orig_argv:
    from tandem_worker.process import build
    def hold():
        pathlib.Path({marker!r}).touch()
        ctypes.PyDLL(None).sleep(60)
    build._import_libraries = hold
"""
"""Loaded before the worker, as `sitecustomize`: a library that takes a minute to load and keeps Python's lock."""


def test_a_library_that_keeps_the_lock_while_it_is_loaded_keeps_nobody(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "held"
    (tmp_path / "sitecustomize.py").write_text(LOCKED.format(marker=str(marker)))
    with workers.run(tmp_path, "unified", tiny_model, environment={"PYTHONPATH": str(tmp_path)}) as worker:
        workers.eventually(marker.exists, 60, "the library is loaded")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(60) == -signal.SIGTERM
