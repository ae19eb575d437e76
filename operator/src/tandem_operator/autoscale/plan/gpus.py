"""What GPUs of all ranks of a role say: the fullest memory, the fullest links, and which are not well. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tandem_api.telemetry import RankTelemetry, WorkerTelemetry

VRAM_FULL = 0.98
"""Share of a GPU's memory from which on it is taken for full: a worker plans for 95% of it at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs of one role."""

    vram_share: float | None = None
    """Share of the memory that is in use, on the GPU where it is largest. None: nobody tells."""
    vram_rank: str = ""
    """Which one that is."""
    link_share: float | None = None
    """Share that its NVLinks take in of what they carry one way, on the GPU where it is largest."""
    link_rank: str = ""
    unwell: tuple[str, ...] = ()
    """GPUs that report critical errors, or whose clocks are lowered, in words."""

    @property
    def is_full(self) -> bool:
        return self.vram_share is not None and self.vram_share >= VRAM_FULL


NO_GPUS = Gpus()


def read_gpus(samples: Iterable[WorkerTelemetry]) -> Gpus:
    """The GPUs of these workers, which tell of all of their ranks."""
    ranks = [(f"{sample.pod} rank {one.rank}", one) for sample in samples for one in sample.ranks]
    vram = max(_shares(ranks, "vram_used_bytes", "vram_total_bytes"), default=None)
    links = max(_shares(ranks, "nvlink_rx_bytes_per_second", "nvlink_bytes_per_second_limit"), default=None)
    return Gpus(
        vram_share=None if vram is None else vram[0],
        vram_rank="" if vram is None else vram[1],
        link_share=None if links is None else links[0],
        link_rank="" if links is None else links[1],
        unwell=tuple(f"{name} ({told})" for name, one in ranks if (told := _tell_health(one))),
    )


def _shares(ranks: Iterable[tuple[str, RankTelemetry]], part: str, whole: str) -> Iterator[tuple[float, str]]:
    for name, one in ranks:
        used, total = getattr(one, part), getattr(one, whole)
        if used is not None and total:
            yield min(1.0, used / total), name


def _tell_health(one: RankTelemetry) -> str:
    told = [
        f"XID {one.xid}" if one.xid else "",
        f"{one.ecc_uncorrected} uncorrected memory errors" if one.ecc_uncorrected else "",
        "clocks lowered by heat or power" if one.slowed else "",
    ]
    return ", ".join(part for part in told if part)
