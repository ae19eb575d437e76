"""The launch configuration of a worker, as the operator mounts it."""

from __future__ import annotations

import logging
from pathlib import Path

from tandem_api.launch import TracingConfig, TTFTDeadline, WorkerConfig

from tandem_worker.host.errors import StartupError

logger = logging.getLogger(__name__)


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


def read_step_seconds(path: Path, config: WorkerConfig) -> float | None:
    """When a step counts as hung, as it is written now (see `WorkerConfig.step_timeout_seconds`)."""
    return _read_again(path, config, "steps are judged").step_timeout_seconds


def read_ttft_target(path: Path, config: WorkerConfig) -> TTFTDeadline | None:
    """The target by which prompts are ordered, as it is written now (see `WorkerConfig.ttft_target`)."""
    return _read_again(path, config, "prompts are ordered").ttft_target


def read_tracing(path: Path, config: WorkerConfig) -> TracingConfig | None:
    """The collector that spans go to, as it is written now (see `WorkerConfig.tracing`)."""
    return _read_again(path, config, "requests are traced").tracing


def read_standby(path: Path, config: WorkerConfig) -> bool:
    """Whether to be on standby, as it is written now (see `WorkerConfig.standby`)."""
    return _read_again(path, config, "on standby").standby


def read_drain_seconds(path: Path, config: WorkerConfig) -> float:
    """How long to drain, as it is written now: it may have changed since the start, and restarts nobody."""
    return _read_again(path, config, "draining").drain_timeout_seconds


def _read_again(path: Path, config: WorkerConfig, doing: str) -> WorkerConfig:
    """The configuration as it is written now, or `config`, that of the start, where it cannot be read."""
    try:
        return load_config(path)
    except StartupError as error:
        logger.warning("%s; %s as it was told at start", error, doing)
        return config
