"""guidellm against a prefill worker, a decode worker and a gateway on loopback: its report, and a table of it.

    make bench-guidellm
    make bench-guidellm BENCH="--cluster default"       (in this namespace of the cluster that `make demo` leaves)
    make bench-guidellm BENCH="--url http://GATEWAY"    (a gateway anywhere)

The demo's model on CPUs: the figures say that guidellm and the server understand each other, and how the machine was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.clients.tokenizer import save_tokenizer
from e2e.cluster import connect
from tests.clients.stack import MODEL, run_stack

GUIDELLM = Path(__file__).parents[2] / ".cache" / "clients" / "guidellm" / "bin" / "guidellm"
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
HEADER = ("load", "requests", "failed", "TTFT ms, median", "p95", "ITL ms, median", "p95", "output tokens/s")


def build_profile(told: argparse.Namespace) -> list[str]:
    """One run for each number of streams, or a sweep: one request after another, as many as go at once, and rates
    between the two."""
    profile = ["--profile", "kind=concurrent,streams=1", "--override", "profile.streams", told.streams]
    if told.sweep:
        profile = ["--profile", f"kind=sweep,sweep_size={told.sweep},max_concurrency={told.most}"]
    return [*profile, "--constraint", f"kind=max_requests,count={told.requests}"]


def build_command(url: str, tokenizer: Path, report: Path, profile: list[str]) -> list[str]:
    return [
        str(GUIDELLM), "run",
        "--backend", f"kind=openai_http,target={url},model={MODEL}",
        *profile,
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={report}", "--disable-progress",
    ]  # fmt: skip


def name_load(strategy: dict[str, Any]) -> str:
    if "streams" in strategy:
        return str(strategy["streams"])
    rate = strategy.get("rate")
    return strategy.get("type_", "") if rate is None else f"{rate:.2f}/s"


def read_row(benchmark: dict[str, Any]) -> list[str]:
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    first, between = (metrics[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    return [
        name_load(benchmark["config"]["strategy"]),
        str(totals["successful"]),
        str(totals["errored"] + totals["incomplete"]),
        *(f"{value:.0f}" for one in (first, between) for value in (one["median"], one["percentiles"]["p95"])),
        f"{metrics['output_tokens_per_second']['total']['mean']:.0f}",
    ]


@contextmanager
def serve(namespace: str | None, folder: Path) -> Iterator[str]:
    """The gateway's URL: of the model in the cluster, or of processes of its own."""
    if namespace is None:
        with run_stack(folder) as stack:
            yield stack.url
    else:
        with connect().service_url(namespace, MODEL, 80) as url:
            yield url


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.clients", description=__doc__)
    parser.add_argument("--streams", default="1,2,4", help="requests at once, one run after another")
    parser.add_argument("--requests", type=int, default=16, help="of each run")
    parser.add_argument("--sweep", type=int, default=0, help="a sweep of so many runs instead, at least 3")
    parser.add_argument("--most", type=int, default=8, help="requests at once in a sweep")
    served = parser.add_mutually_exclusive_group()
    served.add_argument("--cluster", metavar="NAMESPACE", help="where `make cluster` serves the demo's model already")
    served.add_argument("--url", help="a gateway that serves the demo's model already, without /v1")
    told = parser.parse_args()
    with ExitStack() as started:
        folder = started.enter_context(tempfile.TemporaryDirectory())
        url = told.url or started.enter_context(serve(told.cluster, Path(folder)))
        tokenizer, report = Path(folder) / "tokenizer", Path(folder) / "report.json"
        save_tokenizer(tokenizer)
        # Its processes are as many as the machine has cores, which the workers need.
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
        command = build_command(url, tokenizer, report, build_profile(told))
        subprocess.run(command, env=environment, check=True)
        rows = [read_row(benchmark) for benchmark in json.loads(report.read_text())["benchmarks"]]
    for row in (HEADER, ["---"] * len(HEADER), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
