"""What a KV transport offers, and what two workers must agree on before any block moves.

A transport has two ends. The decode end implements `engine.base.PrefillClient`: it is told which reserved blocks to
fill. The prefill end implements `PrefillServer`: it takes orders from the network to `Engine.submit_prefill` and sends
what the engine reports through `engine.base.LayerListener`.

Invariants of every transport:

- Blocks of different weights, revisions, element types or shapes never meet: both ends compare their `Identity` first.
- A block counts as received once its checksum was verified (where `KVConfig.verify` is on). What fails is sent again,
  then given up; it is never used.
- When `PrefillClient.cancel` has returned, nothing of that generation is written any more.
- The prefill end keeps blocks allocated until its peer has acknowledged them or is gone, and not longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from tandem_worker.engine.base import Engine, EngineStats, LayerListener, RemotePrefill, RemotePrefillResult

if TYPE_CHECKING:
    from tandem_worker.models.base import KVCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of the block space as far as a peer must share it. The number of blocks is each worker's own affair."""

    dtype: str
    block_size: int
    """Tokens per block."""
    block_shapes: tuple[tuple[int, ...], ...]
    """One shape per layer."""
    block_bytes: tuple[int, ...]
    """Bytes of one block, per layer."""

    @property
    def num_layers(self) -> int:
        return len(self.block_bytes)

    @property
    def fingerprint(self) -> str:
        """Equal for equal layouts and readable in an error message: `bfloat16/16/30x(2,3,16,64)`."""
        runs = ((shape, len(list(run))) for shape, run in groupby(self.block_shapes))
        shapes = "+".join(f"{count}x({','.join(map(str, shape))})" for shape, count in runs)
        return f"{self.dtype}/{self.block_size}/{shapes}"

    @classmethod
    def of(cls, spec: KVCacheSpec) -> KVLayout:
        shapes = tuple(layer.block_shape for layer in spec.layers)
        sizes: list[int] = []
        for shape in shapes:
            elements = 1
            for extent in shape:
                elements *= extent
            sizes.append(elements * spec.dtype.itemsize)
        return cls(
            dtype=str(spec.dtype).removeprefix("torch."),
            block_size=spec.block_size,
            block_shapes=shapes,
            block_bytes=tuple(sizes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who speaks, and what must be equal at both ends."""

    worker: str
    """Pod name."""
    revision: str
    model_digest: str
    layout: str
    """`KVLayout.fingerprint`."""

    def refusal(self, peer: Identity) -> str | None:
        """Why blocks of `peer` must not be mixed with ours; None when they may."""
        for name, ours, theirs in (
            ("revision", self.revision, peer.revision),
            ("model digest", self.model_digest, peer.model_digest),
            ("KV layout", self.layout, peer.layout),
        ):
            if ours != theirs:
                return f"{name} differs: {self.worker} has {ours!r}, {peer.worker} has {theirs!r}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimeouts:
    """Seconds after which a peer is given up. The kernel's keepalive notices a vanished host on idle connections."""

    connect: float = 2.0
    handshake: float = 3.0
    retry_after: float = 1.0
    """A peer that could not be reached is left alone this long."""
    heartbeat: float = 1.0
    """The prefill end says this often that its engine moves on, while it has orders."""
    silence: float = 5.0
    """A peer with orders that sends nothing at all for this long is gone."""
    stall: float = 30.0
    """An order is given up when neither its blocks nor the peer's engine made progress for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """Counters since the start."""

    bytes_sent: int = 0
    bytes_received: int = 0
    failures: int = 0
    """Transfers that were given up, whatever the reason; the engine then prefills locally."""
    resends: int = 0
    """Times that blocks were asked for again because of a bad checksum."""
    connections: int = 0
    """Open connections to or from peers."""
    bytes_per_second: float | None = None
    """Rate of the last transfers while bytes were moving; None before the first."""


class PrefillEngine(Protocol):
    """The part of `engine.base.Engine` that the prefill end uses."""

    def submit_prefill(self, order: RemotePrefill, listener: LayerListener) -> None: ...

    def release(self, request_id: str) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...


class DecodeEngine(Protocol):
    """The part of `engine.base.Engine` that the decode end uses."""

    def remote_prefill_done(self, result: RemotePrefillResult) -> None: ...

    def remote_prefill_failed(self, request_id: str, generation: int, reason: str) -> None: ...


class PrefillServer(Protocol):
    """Prefill end of a transport."""

    def start(self) -> None:
        """Accept peers. Raises OSError when the port is taken."""
        ...

    def drain(self) -> None:
        """Refuse new orders; those inside go on."""
        ...

    def close(self) -> None:
        """Drop every peer; their orders are aborted and released."""
        ...

    def stats(self) -> TransferStats: ...


Clock = Callable[[], float]


@dataclass(slots=True)
class BandwidthMeter:
    """Bytes per second while bytes move: exponentially weighted over transfers, larger ones count more."""

    half_life_bytes: float = 64e6
    _rate: float | None = field(default=None)

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes <= 0 or seconds <= 0:
            return
        keep = 0.5 ** (num_bytes / self.half_life_bytes)
        sample = num_bytes / seconds
        self._rate = sample if self._rate is None else keep * self._rate + (1 - keep) * sample

    @property
    def rate(self) -> float | None:
        return self._rate


__all__ = [
    "BandwidthMeter",
    "DecodeEngine",
    "Engine",
    "Identity",
    "KVLayout",
    "PrefillEngine",
    "PrefillServer",
    "TransferStats",
    "TransferTimeouts",
]
