"""What was found, for people and for programs: a table, and one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf

from tandem_sim.capacity import Figures, Fleet, Trial
from tandem_sim.comparison import Rate, judge
from tandem_sim.result import Replay
from tandem_sim.workload import Workload

_SIDE = ("attained", "TTFT p90", "token p90")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that a run of `tandem-sim` finds. None: not asked for."""

    workload: Workload
    goal: float
    """Share of requests that must meet both targets."""
    price: float
    """Price of a GPU-hour."""
    requests: int
    seconds: float
    """From the first arrival to the last."""
    smallest: Trial
    """Prefill and decode apart."""
    fewer: Trial | None
    """The best with one replica less; None where there is none."""
    both: Trial | None
    """The smallest fleet of workers that do both; None where none attains."""
    planner: tuple[Figures, Replay] | None
    both_planner: tuple[Figures, Replay] | None = None
    """The planner with workers that do both, in the steps of `both`."""
    replicas: int = 0
    """Replicas of both sides of the comparison."""
    rates: Sequence[Rate] = ()


def build_report(answer: Answer) -> dict[str, object]:
    """For `--json`. Seconds, tokens and GPUs throughout."""
    workload = answer.workload
    document: dict[str, object] = {
        "trace": workload.name,
        "requests": answer.requests,
        "seconds": round(answer.seconds, 3),
        "prompt_tokens": round(workload.prompts.tokens, 1),
        "uncached_prompt_tokens": round(workload.prompts.uncached, 1),
        "output_tokens": round(workload.answers.output, 1),
        "slo": {"ttft": asdict(workload.ttft), "tpot": asdict(workload.tpot), "attain": answer.goal},
        "profile": {name: None if value == inf else value for name, value in asdict(workload.profile).items()},
        "price": answer.price,
        "fleets": [
            {"kind": kind} | asdict(trial.fleet) | _cost(answer, trial.seen, trial.fleet)
            for kind, trial in _list_trials(answer)
        ],
    }  # fmt: skip
    for kind, run in (("autoscaled", answer.planner), ("aggregated_autoscaled", answer.both_planner)):
        if run is None:
            continue
        seen, replay = run
        document[kind] = _cost(answer, seen) | {
            "orders": {
                role.value: [[round(at, 1), count] for at, count in orders] for role, orders in replay.orders.items()
            }
        }
    if answer.rates:
        document["comparison"] = {
            "replicas": answer.replicas,
            "requests_per_second_within_targets": judge(answer.rates, answer.goal),
            "rates": [rate.row() for rate in answer.rates],
        }
    return document


def _list_trials(answer: Answer) -> list[tuple[str, Trial]]:
    found = [("smallest", answer.smallest)]
    if answer.fewer is not None:
        found.append(("one less", answer.fewer))
    if answer.both is not None:
        found.append(("aggregated", answer.both))
    return found


def _cost(answer: Answer, seen: Figures, fleet: Fleet | None = None) -> dict[str, float]:
    cost = seen.gpu_hours * answer.price
    gpus = {} if fleet is None else {"gpus": fleet.replicas * answer.workload.profile.gpus}
    per_million = round(cost / max(1, seen.output_tokens) * 1e6, 4)
    return gpus | seen.row() | {"cost": round(cost, 4), "cost_per_million_output_tokens": per_million}


def write_table(answer: Answer) -> str:
    """For stdout."""
    workload = answer.workload
    ttft, tpot = workload.ttft, workload.tpot
    limit = f"{ttft.seconds:g} s" + (f" + {1000 * ttft.seconds_per_token:g} s per 1k" if ttft.seconds_per_token else "")
    lines = [
        f"{workload.name}: {answer.requests:,} requests in {answer.seconds / 60:.0f} min "
        f"({answer.requests / max(1e-9, answer.seconds):.2f}/s), {workload.prompts.tokens:,.0f} prompt and "
        f"{workload.answers.output:,.0f} output tokens in the mean",
        f"{workload.profile.name}, {workload.profile.gpus} GPU per replica; first token within {limit}, other tokens "
        f"{1000 * tpot.seconds:g} ms in the mean, for {answer.goal:.1%} of requests",
        "",
        *_align([
            ["", "GPUs", "attained", "TTFT p50", "p90", "p99", "token p50", "p90", "p99", "GPU-hours", "cost"],
            *(_row(answer, f"{kind}: {trial.fleet}", trial.seen, trial.fleet) for kind, trial in _list_trials(answer)),
            *(
                _row(answer, f"{kind}: {_range(run[1])}", run[0])
                for kind, run in (("autoscaled", answer.planner), ("aggregated, autoscaled", answer.both_planner))
                if run is not None
            ),
        ]),
        "",
        *_say(answer),
    ]  # fmt: skip
    if answer.rates:
        lines += [
            "",
            f"{answer.replicas} replicas: prefill and decode apart (best ratio), the same with convertible decode "
            "workers, all aggregated (best step)",
            *_align([
                ["requests/s", "|", "ratio", *_SIDE, "|", "convertible", *_SIDE, "|", "step", *_SIDE],
                *(_compare(rate) for rate in answer.rates),
            ]),
        ]  # fmt: skip
    return "\n".join([*lines, ""])


def _row(answer: Answer, name: str, seen: Figures, fleet: Fleet | None = None) -> list[str]:
    return [
        name,
        str(fleet.replicas * answer.workload.profile.gpus) if fleet else "",
        f"{seen.attainment:.2%}",
        *(f"{value:.2f} s" for value in (seen.ttft_p50, seen.ttft_p90, seen.ttft_p99)),
        *(f"{1000 * value:.1f} ms" for value in (seen.token_p50, seen.token_p90, seen.token_p99)),
        f"{seen.gpu_hours:.2f}",
        f"{seen.gpu_hours * answer.price:.2f}",
    ]


def _range(replay: Replay) -> str:
    parts: list[str] = []
    for role, orders in replay.orders.items():
        counts = [count for _, count in orders]
        parts.append(f"{min(counts)} to {max(counts)} {role.value}")
    return " + ".join(parts)


def _compare(rate: Rate) -> list[str]:
    cells = [f"{rate.requests_per_second:.2f}"]
    for trial in rate.trials:
        fleet, seen = trial.fleet, trial.seen
        cells += [
            "|", f"{fleet.prefills}:{fleet.decodes}" if fleet.prefills else str(fleet.chunk), f"{seen.attainment:.1%}",
            f"{seen.ttft_p90:.2f} s", f"{1000 * seen.token_p90:.1f} ms",
        ]  # fmt: skip
    return cells


def _say(answer: Answer) -> list[str]:
    """The answers in words."""
    best = answer.smallest
    gpus = answer.workload.profile.gpus
    lines = [
        f"Needed: {best.fleet.prefills} prefill and {best.fleet.decodes} decode replicas "
        f"({best.fleet.prefills / best.fleet.decodes:.2g} : 1), {best.fleet.replicas * gpus} GPUs."
    ]
    if answer.planner is not None:
        lines.append(_say_autoscaled("Autoscaled", answer.planner[0], best.seen))
    if answer.both is not None:
        lines.append(
            f"Aggregated: {answer.both.fleet.replicas * gpus} GPUs, steps of {answer.both.fleet.chunk} tokens."
        )
    if answer.both is not None and answer.both_planner is not None:
        lines.append(_say_autoscaled("Aggregated and autoscaled", answer.both_planner[0], answer.both.seen))
    if answer.rates:
        lines.append(_say_which(answer))
    return lines


def _say_autoscaled(name: str, own: Figures, fixed: Figures) -> str:
    saved = 1 - own.gpu_hours / fixed.gpu_hours
    word = f"{saved:.0%} fewer" if saved >= 0 else f"{-saved:.0%} more"
    return f"{name}: {word} GPU-hours than that fleet, {own.attainment:.1%} attained."


def _say_which(answer: Answer) -> str:
    found = judge(answer.rates, answer.goal)
    what = {
        "disaggregated": "yes", "aggregated": "no", "either": "it makes no difference (less than 5%)",
    }[str(found["better"])]  # fmt: skip
    return (
        f"Disaggregate? With {answer.replicas} replicas, {what}: {found['disaggregated']:g} requests/s within the "
        f"targets apart, {found['convertible']:g} with convertible decode workers, {found['aggregated']:g} aggregated."
    )


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns; the first to the left."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines: list[str] = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
