"""Workers without Kubernetes: named on the command line or in a file that is read again when it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from tandem_api.engines import ENGINES, needs_prefill
from tandem_api.names import Role

from tandem_gateway.errors import ConfigError
from tandem_gateway.scheduling import Worker
from tandem_gateway.scheduling.endpoint import DEFAULT_KV_TOKENS

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
_KEYS = {"role", "url", "kv", "status", "revision", "name", "kv-tokens", "engine"}


def parse_worker(text: str) -> Worker:
    """A worker written as `role=decode,url=HOST:PORT`, with any of `kv=HOST:PORT`, `status=HOST:PORT`,
    `revision=R`, `name=N`, `kv-tokens=T` and `engine=E`, by commas. `status` is its metrics port.

    Raises:
        ConfigError: `text` is something else.
    """
    pairs = (part.strip().partition("=") for part in text.split(","))
    fields = {key: value for key, _, value in pairs}
    if unknown := set(fields) - _KEYS:
        raise ConfigError(f"worker {text!r}: unknown key {sorted(unknown)[0]!r}; known are {', '.join(sorted(_KEYS))}")
    address = fields.get("url", "").removeprefix("http://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"worker {text!r}: write url=HOST:PORT")
    try:
        role = Role(fields.get("role", Role.DECODE))
    except ValueError as error:
        raise ConfigError(f"worker {text!r}: role is prefill, decode or unified") from error
    kv_tokens = fields.get("kv-tokens", str(DEFAULT_KV_TOKENS))
    if not kv_tokens.isdecimal() or not int(kv_tokens):
        raise ConfigError(f"worker {text!r}: kv-tokens is how many tokens its cache holds, a number above 0")
    kv_address = fields.get("kv", "")
    if kv_address and not kv_address.rpartition(":")[2].isdecimal():
        raise ConfigError(f"worker {text!r}: write kv=HOST:PORT, where it is asked for blocks")
    status = fields.get("status", "")
    if status and not status.rpartition(":")[2].isdigit():
        raise ConfigError(f"worker {text!r}: write status=HOST:PORT, its metrics port")
    engine = fields.get("engine", "Tandem")
    if engine not in ENGINES:
        raise ConfigError(f"worker {text!r}: engine is {', '.join(ENGINES)}")
    return Worker(
        name=fields.get("name") or address,
        address=address,
        role=role,
        revision=fields.get("revision", "static"),
        kv_address=kv_address,
        status_address=status,
        kv_tokens=int(kv_tokens),
        engine=ENGINES[engine],
        needs_prefill=needs_prefill(ENGINES[engine], role),
    )


def parse_workers(lines: Iterable[str]) -> list[Worker]:
    """One worker per line; blank lines and lines that begin with # are skipped."""
    return [parse_worker(line.strip()) for line in lines if line.strip() and not line.lstrip().startswith("#")]


async def follow_file(path: Path, apply: Callable[[list[Worker]], None]) -> None:
    """Apply the file's workers now and whenever it changes. A file that cannot be read keeps the last list."""
    seen: str | None = None
    while True:
        try:
            # A local file of a few lines: reading it blocks for microseconds.
            text = path.read_text()  # noqa: ASYNC240
            if text != seen:
                workers = parse_workers(text.splitlines())
                seen = text
                apply(workers)
        except (OSError, ConfigError) as error:
            log.warning("the workers file cannot be read", extra={"path": str(path), "error": str(error)})
        await asyncio.sleep(POLL_SECONDS)
