"""A model that nobody uses has no worker, or some on standby; the first request, or many at once, wait in the gateway,
wake it and are answered."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from e2e.suite.fleet import Fleet, Object, Say, smollm2, until

MODEL = "sleeper"
CLIENTS = 20
IDLE_AFTER = "20s"
ROLE: Object = {"scaling": {"mode": "SLO", "min": 1, "max": 1}}
LOOSE: Object = {"ttft": {"percentile": 90, "seconds": 60.0}, "tpot": {"seconds": 60.0}}


def ask(url: str, number: int) -> httpx.Response:
    body = {"model": MODEL, "prompt": f"{number}: the sea is", "max_tokens": 4}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=240)


def seconds_waited(answer: httpx.Response) -> float:
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"]
    return float(answer.headers["x-tandem-queue-seconds"])


def reason(fleet: Fleet, kind: str) -> str:
    found = fleet.condition(MODEL, kind)
    return "" if found is None else f"{found['status']} {found['reason']}"


def wait_asleep(fleet: Fleet, *, standby: int = 0) -> None:
    """No worker pod is left but those on standby, the gateway is, and the status says so to people and to programs."""

    def probe() -> bool:
        for role in ("prefill", "decode"):
            assert len(fleet.pods(MODEL, role)) == standby
            if standby:
                assert fleet.get("inferencemodels", MODEL)["status"][role]["standby"] == standby
        told = {kind: reason(fleet, kind) for kind in ("Ready", "Available", "Reconciling", "Stalled", "ScalingActive")}
        assert told == {
            "Ready": "True ScaledToZero", "Available": "True ScaledToZero", "Reconciling": "", "Stalled": "",
            "ScalingActive": "True ScaledToZero",
        }, told  # fmt: skip
        return True

    until("the model to sleep", probe, within=300, every=1.0)
    counts = [fleet.get("statefulsets", f"{MODEL}-{role}")["spec"]["replicas"] for role in ("prefill", "decode")]
    assert counts == [standby, standby]
    assert fleet.get("inferencemodels", MODEL)["status"]["scaling"]["asleepSince"]


@pytest.mark.timeout(1800)
def test_a_model_sleeps_and_wakes_for_requests(fleet: Fleet, say: Say) -> None:
    """Asleep after its time; woken by one request, and, with a gateway that has just started, by twenty at once."""
    manifest = smollm2(MODEL, slo=LOOSE, autoscaling={"scaleToZero": {"idleAfter": IDLE_AFTER}})
    for role in ("prefill", "decode"):
        manifest["spec"][role] |= ROLE
    fleet.apply(manifest)
    fleet.wait_ready(MODEL)
    assert fleet.get("inferencemodels", MODEL)["status"]["routing"]["queue"]["ttlSeconds"] == 600
    with fleet.url(MODEL) as url, ThreadPoolExecutor(CLIENTS) as clients:
        awake = ask(url, 0)
        assert awake.status_code == 200, awake.text
        assert "x-tandem-queue-seconds" not in awake.headers
        wait_asleep(fleet)
        for path in ("/v1/models", "/health"):
            assert httpx.get(url + path, timeout=30).status_code == 200, path
        began, first = time.monotonic(), clients.submit(ask, url, 1)
        until("both roles to be woken", lambda: woken(fleet), within=60, every=0.02)
        say(f"scale to zero: both roles got replicas {time.monotonic() - began:.2f} s after the first request")
        assert reason(fleet, "Stalled") == ""
        cold = seconds_waited(first.result())
        assert cold > 1
        say(f"scale to zero: the first request waited {cold:.1f} s")

        wait_asleep(fleet)
        (gateway,) = fleet.pods(MODEL, "gateway")
        fleet.delete("pods", gateway["metadata"]["name"])
        until("another gateway", lambda: has_other_gateway(fleet, gateway["metadata"]["uid"]), within=180)
    with fleet.url(MODEL) as url, ThreadPoolExecutor(CLIENTS) as clients:
        until(
            "the gateway to be reached", lambda: httpx.get(f"{url}/health", timeout=30).status_code == 200, within=120
        )
        assert not fleet.pods(MODEL, "decode"), "it sleeps on"
        waits = [seconds_waited(answer) for answer in clients.map(lambda number: ask(url, number), range(CLIENTS))]
        say(f"scale to zero: {CLIENTS} requests at once waited {min(waits):.1f} to {max(waits):.1f} s")
        assert "x-tandem-queue-seconds" not in ask(url, CLIENTS).headers
        wait_asleep(fleet)
        fleet.patch(MODEL, {"autoscaling": {"scaleToZero": {"idleAfter": IDLE_AFTER, "standby": {"replicas": 1}}}})
        wait_asleep(fleet, standby=1)
        woken_after: list[float] = []
        for _ in range(2):
            woken_after.append(wake_standby(fleet, url, say))
            wait_asleep(fleet, standby=1)
    # On a machine that other tests share a single one of either may be the longer one.
    assert min(woken_after) < max(cold, *waits), "those on standby answer sooner than others start"
    events = [e for e in fleet.find("events") if e["involvedObject"]["name"] == MODEL]
    told = {e["reason"]: e["message"] for e in events}
    assert "so the model sleeps" in told["FellAsleep"]
    assert "so the model wakes up" in told["WokeUp"]


def wake_standby(fleet: Fleet, url: str, say: Say) -> float:
    """One request, which those on standby answer: no pod is made. Returns the seconds that it waited."""
    before = uids(fleet)
    held = fleet.run_python(f"{MODEL}-decode-0", "worker", RESIDENT)
    waited = seconds_waited(ask(url, CLIENTS + 1))
    assert uids(fleet) == before
    say(f"scale to zero: with one standby of each role, {held.strip()} MiB each, a request waited {waited:.2f} s")
    until("both roles to be woken", lambda: woken(fleet), within=60)
    fleet.wait_ready(MODEL)
    assert uids(fleet).keys() == before.keys()  # a slow machine may have put it to sleep again
    until("its wake to be measured", lambda: wakes(fleet), within=60)
    return waited


def wakes(fleet: Fleet) -> Object:
    return fleet.get("inferencemodels", MODEL)["status"]["scaling"]["start"]["decodeWake"]


def uids(fleet: Fleet) -> dict[str, str]:
    found = [pod for role in ("prefill", "decode") for pod in fleet.pods(MODEL, role)]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}


RESIDENT = """
import pathlib
found = []
for status in pathlib.Path("/proc").glob("[0-9]*/status"):
    try:
        command, text = (status.parent / "cmdline").read_bytes(), status.read_text()
    except OSError:  # it has ended
        continue
    if b"tandem_worker" in command:
        found.append(int(text.split("VmRSS:")[1].split()[0]) // 1024)
print(max(found))
"""


def woken(fleet: Fleet) -> bool:
    return all(fleet.get("statefulsets", f"{MODEL}-{role}")["spec"]["replicas"] == 1 for role in ("prefill", "decode"))


def has_other_gateway(fleet: Fleet, uid: str) -> bool:
    fleet.wait_role(MODEL, "gateway", 1, within=1)
    (found,) = fleet.pods(MODEL, "gateway")
    return found["metadata"]["uid"] != uid
