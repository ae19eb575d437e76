"""Logs for machines: one JSON object a line on standard error, with what the process is (`pod`, `role`, `model`)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from tandem_api.logs import JsonFormatter


def configure_logging(level: str, process: Mapping[str, str]) -> None:
    """Send every logger's lines of at least `level` to standard error. An unknown level means INFO."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    known = logging.getLevelNamesMapping()
    logging.basicConfig(level=known.get(level.upper(), logging.INFO), handlers=[handler], force=True)
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "filelock", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
