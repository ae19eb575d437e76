"""What the first rank of a group and its followers tell each other about transfers, as bytes. Pure.

first rank of a decode worker ── Receive, Withdraw ──▶ followers, which answer with Arrived or Failed
first rank of a prefill worker ── Opened, Ready, Closed ──▶ followers
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.layout import KVShard, RankAddress
from tandem_worker.transfer.protocol import BlockRange


@dataclass(frozen=True, slots=True)
class Receive:
    """Fetch this rank's part of a prompt's blocks into these."""

    transfer: int
    request_id: str
    block_ids: tuple[int, ...]
    first: int
    """Blocks of the prompt before this index are there."""
    ranks: tuple[RankAddress, ...]
    """The prefill worker's."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Write nothing of this transfer any more."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Everything that was to be received is there."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Failed:
    """It cannot be received."""

    transfer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A prompt will be computed whose blocks may be asked for under this number."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Ready:
    """These consecutive blocks of the prompt, `first` being their first index, are complete in every layer."""

    transfer: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """The blocks of this transfer will be used for something else."""

    transfer: int


Message = Receive | Withdraw | Arrived | Failed | Opened | Ready | Closed
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Receive, Withdraw, Arrived, Failed, Opened, Ready, Closed)
}


def encode_message(message: Message) -> bytes:
    """The message's kind and fields as JSON."""
    return json.dumps([type(message).__name__, asdict(message)], separators=(",", ":")).encode()


def decode_message(data: bytes) -> Message:
    """The message of a rank of the same worker, which runs the same code. Raises TransferError for anything else."""
    try:
        name, fields = json.loads(data)
        if "block_ids" in fields:
            fields["block_ids"] = tuple(fields["block_ids"])
        if "ranks" in fields:
            fields["ranks"] = tuple(_read_rank(**rank) for rank in fields["ranks"])
        return _KINDS[name](**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise TransferError(f"{data[:80]!r} is no message about a transfer") from error


def _read_rank(endpoint: str, shard: dict[str, Any]) -> RankAddress:
    return RankAddress(endpoint=endpoint, shard=KVShard(**shard))


@dataclass(frozen=True, slots=True)
class ReadyBlocks:
    """Blocks that a connection may send once `fence` is reached."""

    transfer: int
    blocks: BlockRange
    """Layers count from the first one of the whole model."""
    block_ids: tuple[int, ...]
    fence: object
