"""The launch configuration of a worker, as the operator mounts it."""

from __future__ import annotations

from pathlib import Path

from tandem_api.launch import WorkerConfig

from tandem_worker.host.errors import StartupError


def load_config(path: Path) -> WorkerConfig:
    """Raises StartupError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise StartupError("InvalidConfig", f"The configuration {path} cannot be read: {error}") from error
    try:
        return WorkerConfig.model_validate_json(text)
    except ValueError as error:
        raise StartupError("InvalidConfig", f"The configuration {path} is not valid: {error}") from error
