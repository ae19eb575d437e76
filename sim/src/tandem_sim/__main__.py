"""`tandem-sim TRACE`: how many GPUs a load takes, in which ratio, at what cost, and whether to disaggregate at all."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem_api.names import Role

from tandem_sim.capacity import CapacityError, Trial, Trials, find_chunk, find_smallest, find_split
from tandem_sim.comparison import Rate, compare
from tandem_sim.fetch import SOURCES, FetchError, fetch
from tandem_sim.options import SLO_EXAMPLE, OptionError, find_profile, parse_slo
from tandem_sim.plot import PlotError, check, draw
from tandem_sim.profiles import GPUS, MODELS
from tandem_sim.progress import Progress
from tandem_sim.report import Answer, build_report, write_table
from tandem_sim.shapes import build_constant, play
from tandem_sim.synthetic import MAKERS, write
from tandem_sim.traces import TraceError, read
from tandem_sim.workload import Workload, build_workload

P, D = Role.PREFILL, Role.DECODE
_EPILOG = """tandem-sim fetch conversation|azure downloads a published trace;
tandem-sim make conversation|azure makes requests with its statistics, without a network."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[list[str]], int]] = {"fetch": _fetch, "make": _make}
    try:
        return commands[given[0]](given[1:]) if given and given[0] in commands else _answer(given)
    except (TraceError, OptionError, CapacityError, PlotError, FetchError) as error:
        sys.stderr.write(f"tandem-sim: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"tandem-sim: {error.filename}: {error.strerror}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem-sim", description=__doc__, epilog=_EPILOG)
    add = parser.add_argument
    add("trace", type=Path, help="requests in Mooncake's format (JSON lines) or Azure's (CSV)")
    add(
        "--slo",
        default=SLO_EXAMPLE,
        metavar="TARGETS",
        help="time to the first token, plus so much per prompt tokens, and mean time of the others (%(default)s)",
    )
    add("--attain", type=_percent, default=0.96, metavar="PERCENT", help="requests that must meet both targets (96)")
    add("--gpu", default="H200", help=f"of {', '.join(GPUS)} (%(default)s)")
    add("--model", default="Qwen3-8B", help=f"of {', '.join(MODELS)} (%(default)s)")
    add("--profile", type=Path, metavar="FILE", help="a measured worker as JSON, in place of --gpu and --model")
    add("--price", type=_positive, default=1.0, metavar="NUMBER", help="of a GPU-hour (%(default)s)")
    add("--load", type=_positive, default=1.0, metavar="FACTOR", help="play the trace so many times as fast or dense")
    add(
        "--start-up",
        type=_positive,
        default=45.0,
        metavar="SECONDS",
        help="of a replica, for autoscaling (%(default)s)",
    )
    add("--most", type=int, default=256, metavar="REPLICAS", help="beyond which the search gives up (%(default)s)")
    add("--replicas", type=int, metavar="NUMBER", help="in the comparison; by default as many as are needed")
    add("--minutes", type=_positive, default=7.0, metavar="NUMBER", help="of load per rate compared (%(default)s)")
    add("--no-autoscaling", action="store_true", help="do not run the planner")
    add("--no-comparison", action="store_true", help="do not compare with aggregated workers")
    add("--json", type=Path, metavar="FILE", help="write all figures there; - is stdout, without the table")
    add("--plot", type=Path, metavar="FILE", help="write charts there, as .png and .svg")
    return parser  # fmt: skip


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _percent(text: str) -> float:
    value = float(text.removesuffix("%"))
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 100: write a share of requests in percent")
    return value / 100


def _answer(given: list[str]) -> int:
    options = _build_parser().parse_args(given)
    ttft, tpot = parse_slo(options.slo, options.attain)
    profile = find_profile(options.gpu, options.model, options.profile)
    if options.plot:
        check()
    workload = build_workload(options.trace.name, read(options.trace), profile, ttft=ttft, tpot=tpot)
    progress = Progress()
    answer = find_answer(workload, options, progress)
    progress.clear()
    if options.json and str(options.json) == "-":
        sys.stdout.write(json.dumps(build_report(answer)) + "\n")
    else:
        sys.stdout.write(write_table(answer))
        if options.json:
            options.json.write_text(json.dumps(build_report(answer), indent=1) + "\n")
    for path in draw(answer, options.plot) if options.plot else ():
        sys.stderr.write(f"{path}\n")
    return 0


def find_answer(workload: Workload, options: argparse.Namespace, progress: Progress) -> Answer:
    """Size fleets for the trace as a whole, then compare at equal replicas. Raises CapacityError."""
    arrivals = list(workload.recording)
    span = arrivals[-1].at
    if options.load != 1.0:
        arrivals = play(arrivals, build_constant(max(1.0, span)), options.load)
    trials = Trials(workload, arrivals, tell=progress.tell)
    count, smallest = _size_apart(trials, options)
    both = _size_both(trials, options)
    planner = None if options.no_autoscaling else trials.run_planner(options.start_up)
    both_planner = None
    if both is not None and not options.no_autoscaling:
        both_planner = trials.run_planner(options.start_up, both.fleet.chunk)
    replicas = options.replicas or count
    rates: list[Rate] = []
    if not options.no_comparison:
        around = options.load * replicas / count
        rates = compare(workload, max(2, replicas), seconds=60 * options.minutes, around=around, tell=progress.tell)
    return Answer(
        workload=workload, goal=options.attain, price=options.price, requests=len(arrivals), seconds=arrivals[-1].at,
        smallest=smallest, fewer=find_split(trials, count - 1, _share(smallest)) if count > 2 else None, both=both,
        planner=planner, both_planner=both_planner, replicas=max(2, replicas), rates=rates,
    )  # fmt: skip


def _size_apart(trials: Trials, options: argparse.Namespace) -> tuple[int, Trial]:
    """From what the mean rate takes, with the ratio that was best so far."""
    arrivals, prompts = trials.arrivals, trials.workload.prompts
    rate = len(arrivals) / max(1.0, arrivals[-1].at)
    needed = trials.workload.needed(rate * prompts.uncached, rate)
    share = needed[P] / (needed[P] + needed[D])

    def find(count: int) -> Trial:
        nonlocal share
        found = find_split(trials, count, share)
        share = _share(found)
        return found

    return find_smallest(find, options.attain, least=2, start=needed[P] + needed[D], most=max(2, options.most))


def _share(trial: Trial) -> float:
    return trial.fleet.prefills / trial.fleet.replicas


def _size_both(trials: Trials, options: argparse.Namespace) -> Trial | None:
    if options.no_comparison:
        return None
    arrivals, prompts = trials.arrivals, trials.workload.prompts
    rate = len(arrivals) / max(1.0, arrivals[-1].at)
    start = sum(trials.workload.needed(rate * prompts.uncached, rate).values())
    try:
        _, found = find_smallest(
            lambda count: find_chunk(trials, count), options.attain, least=1, start=start, most=max(2, options.most)
        )
    except CapacityError:
        return None
    return found


# traces


def _fetch(given: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tandem-sim fetch", description="Download a published trace.")
    parser.add_argument("name", choices=sorted(SOURCES))
    parser.add_argument("--to", type=Path, metavar="FILE")
    options = parser.parse_args(given)
    source = SOURCES[options.name]
    path = options.to or Path(source.file)
    sys.stderr.write(f"{source.what}\n{source.url} ({source.license})\n")
    sys.stdout.write(f"{path}: {fetch(options.name, path):,} requests\n")
    return 0


def _make(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tandem-sim make", description="Make requests with the statistics of a published trace."
    )
    parser.add_argument("name", choices=sorted(MAKERS))
    parser.add_argument("--to", type=Path, metavar="FILE")
    parser.add_argument("--minutes", type=_positive, default=60.0)
    parser.add_argument("--rate", type=_positive, metavar="NUMBER", help="requests per second; by default the trace's")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(given)
    path = options.to or Path("made-" + SOURCES[options.name].file)
    rate = {"rate": options.rate} if options.rate else {}
    arrivals = MAKERS[options.name](60 * options.minutes, seed=options.seed, **rate)
    write(arrivals, options.name, path)
    sys.stdout.write(f"{path}: {len(arrivals):,} requests\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
