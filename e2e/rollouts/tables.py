"""One row for each rollout, what makes it good, and the table that adds them up. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, Literal

from e2e.rollouts.cases import SHAPES, TITLES, ChangeKind, RolloutCase
from e2e.rollouts.evidence import Evidence, Meeting
from e2e.suite.load import LoadOutcome

Verdict = Literal["good", "failed", "broken", "wrong", "right"]
HEAD = (
    "change", "shape", "rollouts", "as asked", "streams", "failed", "broken", "wrong", "transfers", "between builds",
    "unsure", "refused by peers", "lowest capacity", "promise", "seconds below", "longest (s)",
)  # fmt: skip
COUNTS = ("streams", "failed", "broken", "wrong", "transfers", "between", "unsure", "refused")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a prompt is answered while nothing happens."""

    text: str
    finish_reason: str
    completion_tokens: int


def judge(outcome: LoadOutcome, expected: Expected) -> Verdict:
    """`failed`: no answer began. `broken`: one began and did not end. `wrong`: it is another one."""
    if not outcome.complete:
        return "failed" if outcome.first_token_seconds is None else "broken"
    said = Expected(outcome.text, outcome.finish_reason or "", outcome.completion_tokens or 0)
    return "right" if said == expected else "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout. Capacities are shares of the model, written as fractions."""

    shape: str
    kind: str
    commit: str
    """Of this repository, with a `+` where files differ from it."""
    at: str
    seconds: float
    streams: int
    failed: int
    broken: int
    wrong: int
    transfers: int
    """Streams whose prompt another pod computed."""
    between: int
    """Of those, between pods of different builds."""
    unsure: int
    """Of those, that no build can be told of for certain."""
    refused: int
    """Times that a worker was sent to a peer of another build, which refused it."""
    lowest: str
    promise: str
    seconds_below: float
    error: str | None = None
    """What did not go as the kind of change asks for."""
    first: str | None = None
    """The first stream that is not right."""

    @property
    def is_good(self) -> bool:
        bad = self.failed + self.broken + self.wrong + self.between + self.unsure + self.refused
        return self.error is None and self.streams > 0 and bad == 0 and Fraction(self.lowest) >= Fraction(self.promise)


def make_row(
    case: RolloutCase,
    asked: Sequence[tuple[LoadOutcome, Expected]],
    evidence: Evidence,
    span: tuple[float, float],
    *,
    refused: int,
    error: str | None,
    commit: str,
    at: str,
) -> Row:
    """`span` is from before the change to its end."""
    verdicts = Counter(judge(outcome, expected) for outcome, expected in asked)
    meetings: Counter[Meeting] = Counter(evidence.meeting(outcome) for outcome, _ in asked)
    promise = SHAPES[case.shape].promise
    bad = next(((o, e) for o, e in asked if judge(o, e) != "right"), None)
    return Row(
        shape=case.shape,
        kind=case.kind.value,
        commit=commit,
        at=at,
        seconds=round(span[1] - span[0], 1),
        streams=len(asked),
        failed=verdicts["failed"],
        broken=verdicts["broken"],
        wrong=verdicts["wrong"],
        transfers=len(asked) - meetings["none"],
        between=meetings["between"],
        unsure=meetings["unsure"],
        refused=refused,
        lowest=str(evidence.lowest(*span)),
        promise=str(promise),
        seconds_below=round(evidence.seconds_below(promise, *span), 2),
        error=error,
        first=None if bad is None else f"{bad[0]}; expected {bad[1]}",
    )


def write_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def read_rows(entries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Raises TypeError for a row of another release's table."""
    known = {field.name for field in fields(Row)}
    for entry in entries:
        if unknown := set(entry) - known:
            raise TypeError(f"the recorded rows have {', '.join(sorted(unknown))}, which this program does not know")
    return [Row(**entry) for entry in entries]


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each kind and shape, and their sum."""
    groups = [
        (TITLES[kind], shape, [row for row in rows if (row.kind, row.shape) == (kind.value, shape)])
        for kind in ChangeKind
        for shape in SHAPES
    ]
    lines = [_line(title, shape, found) for title, shape, found in groups if found]
    if rows:
        lines.append(_line("all", "", rows))
    return "\n".join([_cells(HEAD), _cells(["---"] * len(HEAD)), *(_cells(line) for line in lines)]) + "\n"


def _line(title: str, shape: str, rows: Sequence[Row]) -> list[str]:
    def total(name: str) -> str:
        return str(sum(getattr(row, name) for row in rows))

    promises = sorted({row.promise for row in rows}, key=Fraction)
    lowest = min(Fraction(row.lowest) for row in rows) if len(promises) == 1 else None
    return [
        title, shape, str(len(rows)), str(sum(row.is_good for row in rows)), *(total(name) for name in COUNTS),
        "" if lowest is None else str(lowest), ", ".join(promises), f"{sum(row.seconds_below for row in rows):.1f}",
        f"{max(row.seconds for row in rows):.0f}",
    ]  # fmt: skip


def _cells(words: Sequence[str]) -> str:
    return "| " + " | ".join(words) + " |"


def summary(rows: Sequence[Row], asked: int) -> dict[str, Any]:
    """The last line of a run."""
    bad = [f"{row.kind} of {row.shape}: {row.error or row.first or 'see the table'}" for row in rows if not row.is_good]
    return {
        "soak": "rollouts",
        "rollouts": len(rows),
        "asked": asked,
        "as_asked": sum(row.is_good for row in rows),
        **{name: sum(getattr(row, name) for row in rows) for name in COUNTS},
        "seconds_below_promise": round(sum(row.seconds_below for row in rows), 2),
        "commits": sorted({row.commit for row in rows}),
        "bad": bad,
    }
