"""Clocks, power and temperature while items run, as `nvidia-smi` tells them. Only reads; nothing without it."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from contextlib import suppress
from typing import Any

_FIELDS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "watts": "power.draw", "celsius": "temperature.gpu"}


class Meter:
    """Reads once a second between `start` and `stop`."""

    def __init__(self, program: str = "nvidia-smi") -> None:
        self._program = shutil.which(program)
        self._process: subprocess.Popen[str] | None = None
        self._samples: list[tuple[float, list[float | None]]] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Meter:
        if self._program is not None:
            command = [
                self._program, f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader,nounits",
                "--id=0", "--loop=1",
            ]  # fmt: skip
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
            )
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._thread is not None
        assert self._process.stdout is not None
        self._thread.join(5.0)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._samples.append((time.time(), parse(line)))

    def between(self, began: float, ended: float) -> dict[str, Any]:
        """Median of each figure, and the most power; empty where nothing was read."""
        rows = [row for at, row in self._samples if began <= at <= ended + 1.0]
        found: dict[str, Any] = {}
        for name, column in zip(_FIELDS, zip(*rows, strict=True), strict=False):
            known = [value for value in column if value is not None]
            if known:
                found[name] = statistics.median(known)
                if name == "watts":
                    found["most_watts"] = max(known)
        return found


def parse(line: str) -> list[float | None]:
    """The figures of one line; None for what the driver does not tell."""
    values: list[float | None] = []
    for text in line.split(","):
        try:
            values.append(float(text))
        except ValueError:
            values.append(None)
    values += [None] * len(_FIELDS)
    return values[: len(_FIELDS)]
