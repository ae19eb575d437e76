"""What all parts of one process share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_api import names
from tandem_api.keys import KeyFile, KeyRing, open_ring
from tandem_api.launch import WorkerConfig
from tandem_api.tracing import Tracer

from tandem_worker.host.errors import StartupError
from tandem_worker.host.vitals import Vitals

if TYPE_CHECKING:
    from tandem_worker.host.files.exchange import FileExchange

logger = logging.getLogger(__name__)

ReadRing = Callable[[], KeyRing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    host: str
    """Address that every port of the process is opened at."""
    peers: ReadRing
    """Keys that workers prove to each other, as they are now."""
    api: ReadRing
    """Keys that requests show, as they are now."""
    vitals: Vitals
    tracer: Tracer = field(default_factory=lambda: Tracer("tandem-worker", {}))
    """Traces this process's requests; by default none are traced."""
    files: FileExchange | None = None
    """The model's files, from and for other workers; None where they are not exchanged."""


def open_runtime(config: WorkerConfig, host: str, tracer: Tracer | None = None) -> Runtime:
    """Raises StartupError when the configured keys cannot be read."""
    tracer = tracer or Tracer("tandem-worker", {})
    if config.keys_path is None:
        logger.warning(
            "no keys are configured: whoever reaches this worker's ports is believed to be a gateway or a worker"
        )
        if _shares_files(config):
            logger.warning("without keys the model's files are not shared with other workers")
        return Runtime(host=host, peers=open_ring, api=open_ring, vitals=Vitals(), tracer=tracer)
    folder = Path(config.keys_path)
    peers, api = (_open_keys(folder / name) for name in (names.PEERS_KEY_FILE, names.API_KEY_FILE))
    vitals = Vitals()
    files = None
    if _shares_files(config):  # else nothing of it is imported
        from tandem_worker.host.files.exchange import plan_exchange

        files = plan_exchange(config, peers, vitals)
    return Runtime(host=host, peers=peers, api=api, vitals=vitals, tracer=tracer, files=files)


def _shares_files(config: WorkerConfig) -> bool:
    sharing = config.model.sharing
    return sharing is not None and sharing.enabled and config.model.uri.startswith("hf://")


def _open_keys(path: Path) -> ReadRing:
    try:
        return KeyFile(path).ring
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StartupError(
            "KeysUnreadable",
            f"The keys in {path} cannot be read: {problem}. In a cluster the operator writes them to the Secret "
            f"NAME-keys: delete the Secret, and it makes a new one. Elsewhere, leave out keysPath to run without keys.",
        ) from error
