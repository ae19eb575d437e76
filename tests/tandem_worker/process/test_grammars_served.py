"""A thousand hostile grammars over HTTP: each is answered in time, and a neighbour's stream does not notice."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.tandem_worker.process.test_stalls import ALLOWED_SECONDS, CONTROL_SECONDS, Watch, watching
from tests.tandem_worker.server.structured.hostile import generate

COUNT, AT_ONCE = 1000, 4
ANSWER_SECONDS = 2.0


def body_of(kind: str, grammar: Any) -> bytes:
    """As one JSON text; half a surrogate pair is written as an escape, as a client may."""
    if kind == "schema":
        wanted: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "s", "schema": grammar}}
    else:
        wanted = {"type": "grammar", "grammar": {"syntax": kind, "definition": grammar}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    return json.dumps(body | {"response_format": wanted}).encode()


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_a_thousand_hostile_grammars(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    with workers.run(tmp_path, "unified", tiny_model, freeFormGrammars=True) as worker:
        workers.await_ready(worker)
        bodies = [body_of(kind, grammar) for kind, grammar in generate(COUNT, seed=5)]
        bodies = [body for body in bodies if len(body) < 8 << 20]
        outcomes: list[tuple[float, float, int, str]] = []

        def ask(body: bytes) -> None:
            began = time.monotonic()
            answer = httpx.post(
                worker.url + "/v1/chat/completions",
                content=body,
                headers={"content-type": "application/json"},
                timeout=60,
            )
            outcomes.append((began, time.monotonic(), answer.status_code, answer.text[:200]))

        ask(bodies[-1])  # libraries load more on first use
        outcomes.clear()
        with watching(worker) as watch:
            time.sleep(1.0)
            began = time.monotonic()
            time.sleep(2 * CONTROL_SECONDS)
            control = (began, time.monotonic())
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(ask, bodies))
            attacked = (control[1], time.monotonic())
        assert worker.process.poll() is None
        assert worker.get("/healthz").text == "ok\n"
        assert worker.complete("still here", max_tokens=2)["usage"]["completion_tokens"] > 0
    judge(watch, control, attacked, outcomes)


def judge(
    watch: Watch,
    control: tuple[float, float],
    attacked: tuple[float, float],
    outcomes: list[tuple[float, float, int, str]],
) -> None:
    statuses = Counter(status for _, _, status, _ in outcomes)
    # Less what a sleeping process had to wait for a core at the same time: that is the machine's.
    took = sorted(end - begin - watch._late(begin, end) for begin, end, _, _ in outcomes)
    print(f"\n{len(outcomes)} grammars in {attacked[1] - attacked[0]:.0f} s: {dict(statuses)}")
    middle, late, last = took[len(took) // 2], took[int(0.99 * len(took))], took[-1]
    print(f"answered within {middle:.3f} s (median), {late:.3f} (99%), {last:.3f} (all)")
    for kind in ("pauses", "probes"):
        alone, seen = watch.longest(kind, *control), watch.longest(kind, *attacked)
        print(
            f"{kind}: {[round(1e3 * each) for each in seen[:5]]} ms, alone {[round(1e3 * each) for each in alone[:3]]}"
        )
    assert set(statuses) <= {200, 400, 503}, [outcome for outcome in outcomes if outcome[2] not in {200, 400, 503}]
    assert statuses[503] < 0.02 * len(outcomes), [outcome[3] for outcome in outcomes if outcome[2] == 503][:5]
    assert min(statuses[200], statuses[400]) > 0.1 * len(outcomes)
    assert last < ANSWER_SECONDS
    for kind in ("pauses", "probes"):
        alone, seen = watch.longest(kind, *control), watch.longest(kind, *attacked)
        assert seen[0] < alone[0] + ALLOWED_SECONDS
