"""A thousand hostile grammars over HTTP: each is answered in time, and a neighbour's stream does not notice."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.tandem_worker.process.test_stalls import (
    CONTROL_SECONDS,
    Watch,
    check,
    watching,
)
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
    try:
        return json.dumps(body | {"response_format": wanted}).encode()
    except RecursionError:
        mark = {"type": "json_schema", "json_schema": {"name": "s", "schema": "<deep>"}}
        return json.dumps(body | {"response_format": mark}).replace('"<deep>"', write_deep(grammar)).encode()


def write_deep(schema: Any) -> str:
    """A schema of one in another, which is nested more deeply than the library's encoder goes."""
    heads: list[str] = []
    ends: list[str] = []
    while "items" in schema or "properties" in schema:
        if "items" in schema:
            heads.append('{"type":"array","items":')
            ends.append("}")
            schema = schema["items"]
        else:
            heads.append('{"properties":{"a":')
            ends.append("}}")
            schema = schema["properties"]["a"]
    return "".join([*heads, json.dumps(schema), *reversed(ends)])


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_a_thousand_hostile_grammars(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    bodies = [body_of(kind, grammar) for kind, grammar in generate(COUNT, seed=5)]
    bodies = [body for body in bodies if len(body) < 8 << 20]
    with workers.run(tmp_path, "unified", tiny_model, freeFormGrammars=True) as worker:
        workers.await_ready(worker)
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

        def ask_for_nothing_special() -> None:
            """As long as the others take: what a request takes here whatever it asks for."""
            while not over.is_set():
                began = time.monotonic()
                worker.complete("x", max_tokens=4)
                ordinary.append(time.monotonic() - began)
                time.sleep(0.2)

        ordinary: list[float] = []
        over = threading.Event()
        ask(bodies[-1])  # libraries load more on first use
        outcomes.clear()
        with watching(worker) as watch:
            time.sleep(1.0)
            began = time.monotonic()
            time.sleep(2 * CONTROL_SECONDS)
            control = (began, time.monotonic())
            beside = threading.Thread(target=ask_for_nothing_special)
            beside.start()
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(ask, bodies))
            over.set()
            beside.join()
            attacked = (control[1], time.monotonic())
        assert worker.process.poll() is None
        assert worker.get("/healthz").text == "ok\n"
        assert worker.complete("still here", max_tokens=2)["usage"]["completion_tokens"] > 0
    judge(watch, control, attacked, outcomes, ordinary)


def judge(
    watch: Watch,
    control: tuple[float, float],
    attacked: tuple[float, float],
    outcomes: list[tuple[float, float, int, str]],
    ordinary: list[float],
) -> None:
    statuses = Counter(status for _, _, status, _ in outcomes)
    took = sorted(end - begin for begin, end, _, _ in outcomes)
    ordinary.sort()
    print(f"ordinary requests beside them: {ordinary[len(ordinary) // 2]:.3f} s (median), {ordinary[-1]:.3f} (longest)")
    print(f"\n{len(outcomes)} grammars in {attacked[1] - attacked[0]:.0f} s: {dict(statuses)}")
    middle, late, last = took[len(took) // 2], took[int(0.99 * len(took))], took[-1]
    print(f"answered within {middle:.3f} s (median), {late:.3f} (99%), {last:.3f} (all)")
    # 429: the grammars of all requests together take too long.
    odd = [text for _, _, status, text in outcomes if status not in {200, 400, 429, 503}]
    assert not odd
    assert statuses[503] + statuses[500] < 0.02 * len(outcomes), statuses
    assert min(statuses[200], statuses[400]) > 0.1 * len(outcomes)
    # What ordinary ones take is next to nothing on a machine that is not busy.
    assert late < ANSWER_SECONDS + ordinary[len(ordinary) // 2]
    assert last < ANSWER_SECONDS + ordinary[-1]
    check(watch, control, {"grammars": attacked})
