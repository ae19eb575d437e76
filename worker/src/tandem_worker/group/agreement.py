"""What the ranks of a group must have in common, and what they decide from what each has."""

from __future__ import annotations

from collections.abc import Sequence

from tandem_api.base import Wire

from tandem_worker.host.errors import StartupError
from tandem_worker.transfer.layout import KVLayout, KVShard, RankAddress


class RankReport(Wire):
    """What one rank has after loading its share of the model."""

    num_blocks: int
    """KV blocks that fit into its memory, block 0 included."""
    num_host_blocks: int = 0
    """The same of host memory below that; 0: none is wanted."""
    digest: str
    """Digest of the whole model."""
    dtype: str
    endpoint: str
    """The address where the rank takes KV connections, where its role does."""
    shard: KVShard
    """Its part of every block."""
    share: KVLayout
    """Shape of that part."""
    inexact: str | None = None
    """`CausalLM.inexact` of its layers, on its processor."""
    exact_rows: int = 1
    """`CausalLM.exact_rows` of those."""
    has_head: bool | None = None
    """Whether it computes with a draft head; None: it does not say."""


class GroupPlan(Wire):
    """What every rank sets up alike."""

    num_blocks: int
    num_host_blocks: int = 0
    layout: KVLayout
    """Layout of the whole model's blocks."""
    ranks: tuple[RankAddress, ...]
    max_rows: int
    """Sequences of one step."""
    max_model_len: int


def check_reports(reports: Sequence[RankReport]) -> None:
    """Raises StartupError where ranks do not match; `reports[i]` is rank i's."""
    first = reports[0]
    for rank, report in enumerate(reports):
        if report.digest != first.digest:
            raise StartupError(
                "GroupMismatch",
                f"Rank {rank} has loaded another model than rank 0 (digest {report.digest} instead of {first.digest}): "
                "the pods of a group must see the same files; pin model.revision to a commit.",
            )
        if report.dtype != first.dtype:
            raise StartupError(
                "GroupMismatch",
                f"Rank {rank} computes in {report.dtype}, rank 0 in {first.dtype}: set the engine's dtype instead of "
                "leaving it to what each machine supports.",
            )
        if None not in {report.has_head, first.has_head} and report.has_head != first.has_head:
            having, lacking = (rank, 0) if report.has_head else (0, rank)
            why = reports[lacking].inexact
            raise StartupError(
                "GroupMismatch",
                f"Rank {having} guesses with a draft head and rank {lacking} without"
                + (f", where {why}" if why else "")
                + ": set spec.engine.speculative.method to Lookup or Off instead of leaving it to what each machine "
                "computes with, or give all pods of a group the same processors.",
            )


def find_least_exact(reports: Sequence[RankReport]) -> tuple[str | None, int]:
    """`CausalLM.inexact` and `exact_rows` of a model whose ranks report so: each has layers and a processor of its own,
    and an answer has the bits of all of them."""
    least = min(reports, key=lambda report: report.exact_rows)
    if least.inexact is None and least.exact_rows == 1:
        return "a rank does not say whether its rows are exact", 1
    return least.inexact, least.exact_rows
