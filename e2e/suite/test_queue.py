"""Requests that come before the first worker does wait in the gateway and are answered by it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from e2e.suite.fleet import Fleet, Say, smollm2, until

CLIENTS = 24


def ask(url: str, number: int) -> httpx.Response:
    body = {"model": "queued", "prompt": f"{number}: the sea is", "max_tokens": 4}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=600)


@pytest.mark.timeout(1200)
def test_requests_wait_for_the_first_worker(fleet: Fleet, say: Say) -> None:
    """Two dozen with room for them, then one without, with no worker at all; then there is one."""
    fleet.apply(smollm2("queued", prefill=None, decode=0, gateway={"queue": {"max": CLIENTS, "ttl": "9m"}}))
    fleet.wait_role("queued", "gateway", 1)
    gateway = next(pod["metadata"]["name"] for pod in fleet.pods("queued", "gateway"))

    def waiting() -> float:
        path = fleet.path("pods", f"{gateway}:9090") + "/proxy/metrics"
        lines = fleet.kubernetes.request("GET", path).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("tandem_gateway_queue_requests "))

    with fleet.url("queued") as url, ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(ask, url, number) for number in range(CLIENTS)]
        until("all of them wait", lambda: waiting() == CLIENTS, within=120)
        refused = ask(url, CLIENTS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert refused.headers["retry-after"]
        fleet.patch("queued", {"decode": {"replicas": 1}})
        done = [answer.result() for answer in answers]
        assert [answer.status_code for answer in done] == [200] * CLIENTS
        waits = [float(answer.headers["x-tandem-queue-seconds"]) for answer in done]
        say(f"{CLIENTS} requests waited {min(waits):.0f} to {max(waits):.0f} s for the first worker")
        assert waiting() == 0
        assert "x-tandem-queue-seconds" not in ask(url, CLIENTS).headers
