"""A model's pods know each other by their keys: who has none gets nothing, and keys change while requests run."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import threading
import time
from typing import Any

import pytest
from tandem_api import names
from tandem_api.fleet import FLEET_PATH, FleetReport
from tandem_api.keys import KeyRing, bearer_token, parse_key_ring

from e2e.install import NAMESPACE, settle_seconds
from e2e.suite.fleet import Fleet, Object, Say, leads, smollm2, until
from e2e.suite.load import LoadOutcome, run_load, varied_prompts

COMPLETIONS = "/v1/completions"
FILES = (names.PEERS_KEY_FILE, names.API_KEY_FILE)
STEPS = ("Made", "Added", "Promoted", "Retired")
ASK = """
import http.client, json, sys
host, port, requests = json.loads(sys.argv[1])
for path, headers, body in requests:
    link = http.client.HTTPConnection(host, port, timeout=10)
    try:
        link.connect()
        link.sock.settimeout(60)
        link.request("POST" if body else "GET", path, body, headers)
        answer = link.getresponse()
        print(json.dumps([answer.status, answer.read().decode("utf-8", "replace")]))
    except OSError as error:
        print(json.dumps([0, type(error).__name__]))
    link.close()
"""
KNOCK = """
import socket, sys
try:
    link = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)
    link.sendall(bytes.fromhex(sys.argv[3]))
    while part := link.recv(4096):
        sys.stdout.write(part.hex())
except OSError:
    pass
"""
"""Prints what was said, until the other end closes or 5 s pass in silence."""
LOOK = """
import hashlib, json, os, pathlib, sys
files = {}
for path in pathlib.Path(sys.argv[1]).iterdir():
    if not path.name.startswith(".."):
        try:
            path.open("a").close()
            written = True
        except OSError:
            written = False
        files[path.name] = [oct(path.stat().st_mode & 0o777), written, hashlib.sha256(path.read_bytes()).hexdigest()]
print(json.dumps(files))
"""


def keys_of(fleet: Fleet, model: str) -> dict[str, bytes]:
    """The files of the model's Secret. Raises client.ApiException where there is none."""
    data = fleet.get("secrets", names.keys_name(model))["data"]
    return {file: base64.b64decode(data[file]) for file in FILES}


def rings_of(fleet: Fleet, model: str) -> dict[str, KeyRing]:
    return {file: parse_key_ring(text) for file, text in keys_of(fleet, model).items()}


def containers(fleet: Fleet, model: str) -> list[tuple[str, str]]:
    """Pod and container of every pod of the model."""
    return [(pod["metadata"]["name"], pod["spec"]["containers"][0]["name"]) for pod in fleet.pods(model)]


def mounted(fleet: Fleet, pod: str, container: str) -> dict[str, list[Any]]:
    """By file: mode, whether it could be written, digest."""
    return json.loads(fleet.run_python(pod, container, LOOK, names.KEYS_PATH))


def gateway_of(fleet: Fleet, model: str) -> str:
    return fleet.pods(model, "gateway")[0]["metadata"]["name"]


def address_of(pod: Object) -> str:
    return pod["status"]["podIP"]


def ask_all(
    fleet: Fleet, source: tuple[str, str], host: str, port: int, requests: list[tuple[str, str | None]]
) -> list[tuple[int, str]]:
    """Status and body for each path and token, asked from inside a container; status 0 where nothing answered."""
    completion = '{"model": "main", "prompt": "x", "max_tokens": 1}'
    asked: list[tuple[str, dict[str, str], str | None]] = []
    for path, token in requests:
        shown = {} if token is None else {names.HEADER_TOKEN: token}
        asked.append((path, shown, completion if path == COMPLETIONS else None))
    lines = fleet.run_python(*source, ASK, json.dumps([host, port, asked])).splitlines()
    return [tuple(json.loads(line)) for line in lines]


def ask(
    fleet: Fleet, source: tuple[str, str], host: str, port: int, path: str, *, token: str | None = None
) -> tuple[int, str]:
    (answer,) = ask_all(fleet, source, host, port, [(path, token)])
    return answer


def metrics_of(fleet: Fleet, pod: str) -> str:
    return fleet.kubernetes.request("GET", fleet.path("pods", f"{pod}:{names.WORKER_METRICS_PORT}") + "/proxy/metrics")


def local_prefills(fleet: Fleet, model: str) -> float:
    """Prompts that decode workers computed because no prefill worker did."""
    decode = [pod for pod in fleet.pods(model, "decode") if leads(pod)]
    text = "\n".join(metrics_of(fleet, pod["metadata"]["name"]) for pod in decode)
    found = re.findall(r'^tandem_worker_prefills_total\{[^}]*where="fallback"[^}]*\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


def test_every_pod_has_the_keys_that_it_needs_and_no_others(main: Fleet) -> None:
    rings = rings_of(main, "main")
    assert not set(rings[FILES[0]].keys.values()) & set(rings[FILES[1]].keys.values())
    (owner,) = main.get("secrets", "main-keys")["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("InferenceModel", "main")
    for pod, container in containers(main, "main"):
        files = mounted(main, pod, container)
        wanted = {names.API_KEY_FILE} if container == "gateway" else set(FILES)
        assert files.keys() == wanted, pod
        assert {(mode, written) for mode, written, _ in files.values()} == {("0o440", False)}, pod


def test_every_kind_of_pod_has_a_policy(main: Fleet) -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in main.find("networkpolicies")}
    own = {name: spec for name, spec in policies.items() if name in ("main", "main-prefill", "main-decode")}
    assert len(own) == 3
    for name, spec in own.items():
        assert spec["policyTypes"] == ["Ingress", "Egress"], name
        labels = spec["podSelector"]["matchLabels"]
        selected = main.find("pods", ",".join(f"{key}={value}" for key, value in labels.items()))
        assert selected, name
        assert {pod["metadata"]["labels"]["tandem.dev/model"] for pod in selected} == {"main"}


def test_the_inference_port_wants_the_token(main: Fleet) -> None:
    """Asked from the gateway's pod, which every policy lets through: what is left is the token."""
    source = (gateway_of(main, "main"), "gateway")
    token = bearer_token(rings_of(main, "main")[names.API_KEY_FILE])
    peers = bearer_token(rings_of(main, "main")[names.PEERS_KEY_FILE])
    wrong = [None, "", "x", token[:-1], peers]
    requests = [(path, shown) for path in ("/v1/models", COMPLETIONS, "/metrics", "/nowhere") for shown in wrong]
    for pod in [*main.pods("main", "decode"), *main.pods("main", "prefill")]:
        name, host = pod["metadata"]["name"], address_of(pod)
        answers = ask_all(main, source, host, names.WORKER_HTTP_PORT, requests)
        # Where policies are enforced, the gateway does not reach this port of prefill workers.
        refused = {401} if "decode" in name else {401, 0}
        seen = [(path, status) for (path, _), (status, _) in zip(requests, answers, strict=True)]
        assert {status for _, status in seen} <= refused, (name, seen)
        assert not [text for _, text in answers if token[:20] in text]
    (decode,) = main.pods("main", "decode")
    good = ask_all(
        main, source, address_of(decode), names.WORKER_HTTP_PORT, [("/v1/models", token), (COMPLETIONS, token)]
    )
    assert [status for status, _ in good] == [200, 200]


def test_peers_ports_say_nothing_to_a_stranger(main: Fleet) -> None:
    gateway = gateway_of(main, "main")
    for pod in [*main.pods("main", "decode"), *main.pods("main", "prefill")]:
        for payload in (b"", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\0" * 64, b"\x10\0\0\0\1" + b"\0" * 60):
            said = main.run_python(gateway, "gateway", KNOCK, address_of(pod), str(names.WORKER_KV_PORT), payload.hex())
            assert said.strip() == "", payload
    main.wait_blocks_free("main")


def test_metrics_want_no_token_and_the_schedulers_view_is_for_the_pod_itself(main: Fleet) -> None:
    (gateway,) = main.pods("main", "gateway")
    (decode,) = main.pods("main", "decode")
    name = decode["metadata"]["name"]
    assert "tandem_worker_" in metrics_of(main, name)
    assert main.kubernetes.request("GET", main.path("pods", f"{name}:9090") + "/proxy/healthz").strip() == "ok"
    local = (gateway["metadata"]["name"], "gateway")
    assert ask(main, local, "127.0.0.1", names.GATEWAY_METRICS_PORT, "/debug/endpoints")[0] == 200
    other = (name, "worker")
    status, text = ask(main, other, address_of(gateway), names.GATEWAY_METRICS_PORT, "/debug/endpoints")
    assert status in (0, 403)
    assert name not in text


def test_gateways_read_what_every_worker_tells_about_itself(main: Fleet) -> None:
    """Through the policies of both ends, of prefill workers too; and what it says is what the worker says itself."""
    (gateway,) = main.pods("main", "gateway")
    path = main.path("pods", f"{gateway['metadata']['name']}:{names.GATEWAY_METRICS_PORT}") + f"/proxy{FLEET_PATH}"
    workers = {pod["metadata"]["name"] for role in ("decode", "prefill") for pod in main.pods("main", role)}

    def probe() -> FleetReport:
        report = FleetReport.model_validate(main.kubernetes.request("GET", path))
        ages = {worker.name: worker.telemetry_age for worker in report.workers}
        assert ages.keys() == workers
        assert all(age is not None and age < 5 for age in ages.values()), ages
        return report

    report = until("the gateway has a fresh sample of every worker", probe, within=60)
    assert report.traffic is not None
    assert report.traffic.requests >= report.traffic.finished
    for worker in report.workers:
        assert worker.telemetry is not None
        assert (worker.telemetry.pod, worker.telemetry.role) == (worker.name, worker.role)
        own = main.telemetry(worker.name)
        assert own["kvBlocksTotal"] * own["kvBlockSize"] > 0
        assert own["busySecondsTotal"] >= (worker.telemetry.busy_seconds_total or 0)


class Load:
    """Requests without pause on a thread, from `with` until its end."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.outcomes: list[LoadOutcome] = []
        self.failure: Exception | None = None

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                prompts = varied_prompts(12)
                work = run_load(self._url, self._model, prompts, concurrency=3, max_tokens=8, limit=240)
                self.outcomes += asyncio.run(work)
        except Exception as error:
            self.failure = error


def wait_mounted(fleet: Fleet, model: str, within: float) -> float:
    """Seconds until every pod has seen the Secret as it was then."""
    started = time.monotonic()

    def arrived(pod: str, container: str) -> bool:
        wanted = {file: hashlib.sha256(text).hexdigest() for file, text in keys_of(fleet, model).items()}
        seen = {file: digest for file, (_, _, digest) in mounted(fleet, pod, container).items()}
        assert seen == {file: wanted[file] for file in seen}, "an earlier Secret"
        return True

    for pod, container in containers(fleet, model):
        until(f"the keys to be in {pod}", lambda p=pod, c=container: arrived(p, c), within=within)
    return time.monotonic() - started


@pytest.mark.timeout(900)
def test_keys_rotate_under_load_without_a_failed_request(main: Fleet, say: Say) -> None:
    main.wait_ready("main")
    settle = settle_seconds(main.cluster)
    before = rings_of(main, "main")[names.API_KEY_FILE]
    lives = {pod["metadata"]["uid"]: restarts_of(pod) for pod in main.pods("main")}
    generations = generations_of(main, "main")
    fallbacks = local_prefills(main, "main")
    arrivals: list[float] = []
    with main.url("main") as url, Load(url, "main") as load:
        main.annotate("main", {"tandem.dev/rotate-keys": f"e2e {time.time()}"})
        for step in STEPS[1:]:
            until(f"step {step}", lambda step=step: has_taken(main, "main", step), within=2 * settle + 60, every=0.5)
            arrivals.append(wait_mounted(main, "main", within=2 * settle + 60))
        after, enough = rings_of(main, "main")[names.API_KEY_FILE], len(load.outcomes) + 36
        # Processes read the files again every second, and requests run on with what they read.
        until("more requests", lambda: len(load.outcomes) >= enough or load.failure, within=240)
    say(
        f"keys rotated in {len(arrivals)} steps under {len(load.outcomes)} requests; a step was in every pod after "
        + ", ".join(f"{seconds:.0f}" for seconds in arrivals)
        + f" s (settling time {settle} s)"
    )
    assert load.failure is None
    assert len(load.outcomes) >= 12
    failed = [outcome for outcome in load.outcomes if not outcome.complete]
    assert not failed, f"{len(failed)} of {len(load.outcomes)} failed; the first: {failed[0]}"
    assert local_prefills(main, "main") == fallbacks, "prefill and decode workers never stopped believing each other"
    assert 'reason="unauthorized"' not in metrics_of(main, gateway_of(main, "main"))
    assert {pod["metadata"]["uid"]: restarts_of(pod) for pod in main.pods("main")} == lives
    assert generations_of(main, "main") == generations
    assert not set(before.keys) & set(after.keys)
    source, host = (gateway_of(main, "main"), "gateway"), address_of(main.pods("main", "decode")[0])
    assert ask(main, source, host, names.WORKER_HTTP_PORT, "/v1/models", token=bearer_token(after))[0] == 200
    assert ask(main, source, host, names.WORKER_HTTP_PORT, "/v1/models", token=bearer_token(before))[0] == 401
    reasons = {event["reason"] for event in main.find("events") if event["involvedObject"]["name"] == "main"}
    assert {"KeysMade", "RotatingKeys", "KeysRotated"} <= reasons
    assert_nowhere(main, [*before.keys.values(), *after.keys.values()])


def has_taken(fleet: Fleet, model: str, step: str) -> bool:
    """Whether the keys are that far: the next step does not wait for whoever looks."""
    taken = fleet.get("secrets", names.keys_name(model))["metadata"]["annotations"]["tandem.dev/keys-step"]
    return STEPS.index(taken) >= STEPS.index(step)


def restarts_of(pod: Object) -> int:
    return pod["status"]["containerStatuses"][0]["restartCount"]


def generations_of(fleet: Fleet, model: str) -> dict[str, int]:
    children = fleet.children(model).items()
    return {name: child["metadata"]["generation"] for name, child in children if "template" in child.get("spec", {})}


def assert_nowhere(fleet: Fleet, keys: list[bytes]) -> None:
    """No key is in an object other than the Secret, or in a log."""
    kinds = "pods,configmaps,statefulsets,deployments,events,inferencemodels.tandem.dev,services"
    texts = {"objects": fleet.cluster.kubectl("-n", fleet.namespace, "get", kinds, "-o", "json")}
    texts["operator"] = fleet.cluster.kubectl("-n", NAMESPACE, "logs", "deploy/tandem-operator")
    for pod, container in containers(fleet, "main"):
        texts[pod] = fleet.cluster.kubectl("-n", fleet.namespace, "logs", pod, "-c", container)
    for where, text in texts.items():
        for key in keys:
            assert key.hex()[:24] not in text, where


@pytest.mark.timeout(600)
def test_a_secret_that_is_broken_is_named_and_one_that_is_deleted_made_anew(fleet: Fleet, say: Say) -> None:
    settle = settle_seconds(fleet.cluster)
    fleet.apply(smollm2("anew", prefill=None))
    fleet.wait_ready("anew")
    old = rings_of(fleet, "anew")[names.API_KEY_FILE]
    lives = {pod["metadata"]["uid"]: restarts_of(pod) for pod in fleet.pods("anew")}
    broken = {"data": {names.API_KEY_FILE: base64.b64encode(b"{}").decode()}}
    fleet.kubernetes.request("PATCH", fleet.path("secrets", "anew-keys"), broken, "application/merge-patch+json")
    fleet.annotate("anew", {"tandem-e2e/touched": "1"})  # the operator does not watch Secrets
    until("the condition to name it", lambda: reason_of(fleet, "anew", "Stalled") == "KeysUnreadable", within=60)
    wait_broken(fleet, within=2 * settle + 60)
    time.sleep(2)
    assert answers(fleet, "anew"), "running pods keep the last good keys"

    fleet.delete("secrets", "anew-keys")
    deleted = time.monotonic()
    fleet.annotate("anew", {"tandem-e2e/touched": "2"})
    until("a new Secret", lambda: not set(rings_of(fleet, "anew")[names.API_KEY_FILE].keys) & set(old.keys), within=60)
    arrived = wait_mounted(fleet, "anew", within=2 * settle + 60)
    until("a request to be answered", lambda: answers(fleet, "anew"), within=120)
    say(f"deleted keys: new ones in every pod after {arrived:.0f} s, answers after {time.monotonic() - deleted:.0f} s")
    assert reason_of(fleet, "anew", "Stalled") is None
    assert {pod["metadata"]["uid"]: restarts_of(pod) for pod in fleet.pods("anew")} == lives


def wait_broken(fleet: Fleet, within: float) -> None:
    """Until every pod sees what is no ring."""
    digest = hashlib.sha256(b"{}").hexdigest()
    for pod, container in containers(fleet, "anew"):
        until(
            f"the broken file in {pod}",
            lambda p=pod, c=container: mounted(fleet, p, c)[names.API_KEY_FILE][2] == digest,
            within=within,
        )


def reason_of(fleet: Fleet, model: str, kind: str) -> str | None:
    condition = fleet.condition(model, kind)
    return None if condition is None else condition["reason"]


def answers(fleet: Fleet, model: str) -> bool:
    """Whether a request is answered. A refusal in the meantime must not be the client's own."""
    with fleet.url(model) as url:
        (outcome,) = asyncio.run(run_load(url, model, ["Say hi."], concurrency=1, max_tokens=2, limit=120))
    assert "401" not in (outcome.error or "")
    return outcome.complete
