"""Rollouts of every kind, of three shapes of a model, while clients ask: nothing failed, nothing broken, nothing wrong.

    make soak-rollouts COUNT=50
    python -m e2e.rollouts --count 50 --shapes 1+1,2+4,group --kinds image,canary --minutes 10

Needs the cluster (`make cluster`). What was done is recorded after each rollout, and a run does what is missing: many
short ones add up to one table. Rollouts that were not as asked stay in it; `--again` does these once more. The last
line is one JSON object; the exit status is 0 when all rollouts asked for were as asked.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kubernetes import client

from e2e.cluster import Cluster, connect
from e2e.install import ROOT, install_chart
from e2e.rollouts.cases import SHAPES, TITLES, ChangeKind, FleetShape, RolloutCase, manifest, missing_cases, plan_cases
from e2e.rollouts.changes import CHANGES, Site
from e2e.rollouts.evidence import Evidence
from e2e.rollouts.images import both_names
from e2e.rollouts.streams import Clients, learn
from e2e.rollouts.tables import Expected, Row, make_row, read_rows, summary, table, write_rows
from e2e.rollouts.watching import Watch
from e2e.suite.conftest import make_namespace
from e2e.suite.fleet import Kubernetes, NotReached, until

RECORD = ROOT / ".cache" / "rollouts"
CLIENTS = 3
PAUSE = 0.3
WARM = 4
"""Answers before the change."""
AFTER = 5.0
"""Seconds of load after it."""
START_LIMIT = 600.0


class Soak:
    def __init__(self, cluster: Cluster, record: Path, *, clients: int, pause: float) -> None:
        self.cluster = cluster
        self.kubernetes = Kubernetes(str(cluster.kubeconfig))
        self.images = both_names(cluster)
        self.record = record
        self.clients, self.pause = clients, pause
        self.site: Site | None = None
        """The model that is there now."""
        self.expected: dict[str, Expected] = {}
        """What the first model answered before anything was changed. All shapes compute the same."""

    def set_up(self, shape: FleetShape) -> Site:
        """The model of this shape: the one that is there, or another one."""
        if self.site is not None and self.site.shape == shape:
            return self.site
        self.clear()
        name = f"rollouts-{shape.prefill}-{shape.decode * shape.nodes}"
        fleet = make_namespace(self.cluster, self.kubernetes, f"{name}-{uuid.uuid4().hex[:5]}")
        fleet.apply(manifest(shape, name, self.images[0]))
        say(f"{shape.name}: waiting for the model")
        self.site = Site(fleet, name, shape, self.images)
        fleet.wait_ready(name, within=START_LIMIT)
        for role, count in shape.pods.items():
            fleet.wait_role(name, role, count, within=START_LIMIT)
        if not self.expected:
            with fleet.url(name) as url:
                self.expected = learn(url, name)
            say(f"{len(self.expected)} prompts have a clear answer")
        return self.site

    def clear(self) -> None:
        """Delete the namespace, and wait until its pods are gone: two shapes at a time have no room."""
        if self.site is None:
            return
        fleet, self.site = self.site.fleet, None
        self.kubernetes.request("DELETE", f"/api/v1/namespaces/{fleet.namespace}")
        until("the pods of the last shape to be gone", lambda: not fleet.find("pods"), within=120)

    def run(self, case: RolloutCase, commit: str) -> Row:
        """One rollout. A change that does not do what it should is a row with an error, after evidence was gathered."""
        site = self.set_up(SHAPES[case.shape])
        evidence = Evidence(site.shape.wanted)
        logs = self.record / "logs" / f"{case.number:03}-{case.shape}-{case.kind.value}-{int(time.time())}"
        error: str | None = None
        with ExitStack() as stack:
            url = stack.enter_context(site.fleet.url(site.model))
            clients = Clients(url, site.model, self.expected, count=self.clients, pause=self.pause)
            watch = Watch(site.fleet, site.model, evidence, logs)
            watch.start()
            stack.callback(watch.stop)
            until("every pod to be seen ready", lambda: evidence.level == 1, within=30)
            clients.start()
            stack.callback(clients.stop)
            until("the first answers", lambda: len(clients.asked) >= WARM, within=180)
            began = time.monotonic()
            try:
                CHANGES[case.kind](site)
            except (AssertionError, client.ApiException) as failure:  # NotReached is an AssertionError
                error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:2000]}"
                self.cluster.artifacts_dump(logs / "cluster")
            span = began, time.monotonic()
            time.sleep(AFTER)
        if error is not None:
            self.clear()
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return make_row(case, clients.asked, evidence, span, refused=watch.refused(), error=error, commit=commit, at=at)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def present_commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


def read(record: Path) -> list[Row]:
    file = record / "rollouts.json"
    return read_rows(json.loads(file.read_text())) if file.exists() else []


def write(record: Path, rows: Sequence[Row]) -> None:
    """The rows and their table. Written beside and renamed: an interrupted run loses nothing."""
    record.mkdir(parents=True, exist_ok=True)
    for name, text in (("rollouts.json", json.dumps(write_rows(rows), indent=1)), ("rollouts.md", table(rows))):
        unfinished = record / f"{name}.unfinished"
        unfinished.write_text(text)
        unfinished.rename(record / name)


def choose(text: str, known: Sequence[str], what: str) -> list[str]:
    chosen = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in chosen if word not in known]:
        raise SystemExit(f"there is no {what} `{unknown[0]}`: write some of {', '.join(known)}")
    return chosen


def parse(arguments: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m e2e.rollouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50, help="rollouts in all, those of earlier runs included")
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="prefill+decode workers; `group` has replicas of two pods"
    )
    parser.add_argument(
        "--kinds", default=",".join(ChangeKind), help=", ".join(f"{k.value}: {t}" for k, t in TITLES.items())
    )
    parser.add_argument("--minutes", type=float, help="begin no rollout after so long")
    parser.add_argument("--record", type=Path, default=RECORD, help="folder of rollouts.json, rollouts.md and logs")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="that ask at the same time")
    parser.add_argument("--pause", type=float, default=PAUSE, help="seconds that each of them waits after an answer")
    parser.add_argument("--again", action="store_true", help="forget recorded rollouts that were not as asked")
    parser.add_argument("--table", action="store_true", help="print the table of what is recorded, and do nothing")
    return parser.parse_args(arguments)


def carry_out(options: Any, cases: Sequence[RolloutCase], rows: list[Row]) -> None:
    cluster = connect()
    install_chart(cluster)
    soak = Soak(cluster, options.record, clients=options.clients, pause=options.pause)
    commit, deadline = present_commit(), time.monotonic() + 60 * (options.minutes or 1e9)
    try:
        for case in cases:
            if time.monotonic() > deadline:
                say(f"{options.minutes:g} minutes are over")
                break
            say(f"{case.number}: {TITLES[case.kind]}, {case.shape}")
            row = soak.run(case, commit)
            rows.append(row)
            write(options.record, rows)
            say(f"{case.number}: {'as asked' if row.is_good else 'NOT as asked'} in {row.seconds:.0f} s, "
                f"{row.streams} streams, capacity at least {row.lowest} {row.error or ''}")  # fmt: skip
    finally:
        soak.clear()


def end(number: int, frame: object) -> None:
    """What was started is stopped on the way out."""
    raise SystemExit(128 + number)


def main() -> int:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, end)
    shapes = choose(options.shapes, list(SHAPES), "shape")
    kinds = [ChangeKind(word) for word in choose(options.kinds, list(ChangeKind), "kind")]
    rows = read(options.record)
    if options.again:
        rows = [row for row in rows if row.is_good]
    cases = missing_cases(plan_cases(options.count, shapes, kinds), [(row.shape, row.kind) for row in rows])
    try:
        if cases and not options.table:
            carry_out(options, cases, rows)
    except NotReached as error:
        say(f"the model did not come up: {error}")
    print(f"\n{table(rows)}")
    result = summary(rows, options.count)
    print(json.dumps(result))
    return 0 if result["as_asked"] == len(rows) >= options.count else 1


if __name__ == "__main__":
    sys.exit(main())
