"""Logs as one JSON object a line, with whatever a call passes as `extra`."""

from __future__ import annotations

import logging
import sys

from tandem_api.logs import JsonFormatter

_QUIET = ("kopf", "aiohttp.access", "asyncio", "urllib3")


def set_up_logging(level: str) -> None:
    """Send every logger's records to standard error as JSON. Frameworks speak from their warnings up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(plain_only=True))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)
