"""What the ranks of a group have in common is what the one has that has least."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_api.launch import SpeculativeConfig
from tandem_worker.engine.speculation import find_obstacle, keeps_exact
from tandem_worker.group.agreement import RankReport, check_reports
from tandem_worker.group.executor import GroupSeat, describe_rank
from tandem_worker.host.errors import StartupError
from tandem_worker.parallel.context import SINGLE
from tandem_worker.parallel.shape import GroupShape

from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.group.conftest import build_config

AUTO = SpeculativeConfig(method="Auto")


class Model(HistoryModel):
    """A stage, whose rows are exact up to some number."""

    num_kv_heads = 1

    def __init__(self, inexact: str | None, exact_rows: int, *, has_head: bool = False) -> None:
        super().__init__()
        self.inexact, self.exact_rows, self.has_head = inexact, exact_rows, has_head


def report(model: Model) -> RankReport:
    figures: Any = SimpleNamespace(num_layers=2)
    told = describe_rank(model, build_config(Path("m"), {}, {}), "d", SINGLE, figures, "")
    return RankReport.model_validate_json(told.to_json())


@pytest.mark.parametrize(
    ("own", "other", "obstacle", "rows"),
    [
        ((None, sys.maxsize), (None, sys.maxsize), "", None),
        (("of sums", 32), ("of sums", 32), "", 32),
        (("of sums", 32), ("of experts", 1), "because of experts", None),
        ((None, sys.maxsize), ("of AMX", 1), "because of AMX", None),
        ((None, sys.maxsize), ("of sums", 32), "", 32),
        ((None, sys.maxsize), None, "because a rank does not say", None),
    ],
)
def test_guesses_keep_answers_bits_on_every_stage(
    own: tuple[str | None, int], other: tuple[str | None, int] | None, obstacle: str, rows: int | None
) -> None:
    """Dense layers on the first stage and experts on the next, or a processor that computes otherwise."""
    told = report(Model(*(other or (None, 1))))
    if other is None:
        told = RankReport.model_validate(told.model_dump(exclude={"inexact", "exact_rows", "has_head"}))
    leader, figures = SimpleNamespace(collect=lambda: [told.to_json().encode()]), SimpleNamespace(num_layers=2)
    seat: Any = GroupSeat(leader=leader, context=SINGLE, shape=GroupShape(pp=2), model=figures, endpoint="")  # type: ignore[arg-type]
    model = Model(*own)
    seat.agree_num_blocks(model, build_config(Path("m"), {}, {}), "d")
    why = find_obstacle(AUTO, model)
    assert (obstacle in why) if why else not obstacle
    assert (model.exact_rows if keeps_exact(AUTO, model) and not why else None) == rows


def test_a_head_that_some_ranks_lack_is_told() -> None:
    """Under Auto each rank decides by what it computes with."""
    with_head, without = report(Model(None, sys.maxsize, has_head=True)), report(Model("of AMX", 1))
    check_reports([with_head, with_head])
    for reports in ([with_head, without], [without, with_head]):
        with pytest.raises(StartupError, match=r"Rank \d guesses with a draft head and rank \d without, where of AMX"):
            check_reports(reports)
