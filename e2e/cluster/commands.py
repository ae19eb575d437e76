"""Runs programs and waits for conditions."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .errors import ClusterError, CommandFailed

POLL = 0.05


def run(
    *command: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    timeout: float | None = None,
    log: Path | None = None,
) -> str:
    """Standard output of a program. Raises CommandFailed; with `log`, both streams go to that file instead."""
    words = [str(word) for word in command]
    environment = None if env is None else {**os.environ, **env}
    try:
        if log is not None:
            return _run_logged(words, environment, cwd, timeout, log)
        result = subprocess.run(
            words, env=environment, cwd=cwd, input=stdin, timeout=timeout, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise ClusterError(f"the program `{words[0]}` is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{' '.join(words[:6])}` did not end within {timeout:.0f} s") from error
    if result.returncode:
        raise CommandFailed(words, result.returncode, result.stderr or result.stdout)
    return result.stdout


def _run_logged(
    words: list[str], environment: Mapping[str, str] | None, cwd: Path | None, timeout: float | None, log: Path
) -> str:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        code = subprocess.run(
            words, env=environment, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, timeout=timeout, check=False
        ).returncode
    if code:
        raise CommandFailed(words, code, f"{log.read_text(errors='replace')}\n(all of it: {log})")
    return ""


def succeeds(*command: str | Path, timeout: float = 20) -> bool:
    """Whether the program is there, answers in time, and answers with success."""
    try:
        run(*command, timeout=timeout)
    except ClusterError:
        return False
    return True


def wait_until(condition: Callable[[], bool], what: str, limit: float) -> None:
    """Return as soon as `condition` holds. Raises ClusterError naming `what` after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {limit:.0f} s")
        time.sleep(POLL)
