"""Two workers of a model give each other what they have computed, over the cluster's network and past its policies. One
that gets nothing of whom it asks is told of."""

from __future__ import annotations

import itertools
import json

from tandem_api import names
from tandem_api.keys import bearer_token

from e2e.suite.fleet import Fleet, Say, smollm2, until
from e2e.suite.test_keys import rings_of

MODEL = "sharing"
ASK = """
import json, sys, time, urllib.request
headers, body = json.loads(sys.argv[1]), sys.argv[2].encode()
request = urllib.request.Request("http://" + sys.argv[3] + "/v1/completions", body, headers)
began = time.monotonic()
answer = json.load(urllib.request.urlopen(request, timeout=60))
print(json.dumps([answer["choices"][0]["text"], answer["usage"], time.monotonic() - began]))
"""
NOBODY = 9
"""A port at which no worker listens."""
PROMPT = "The quick brown fox jumps over the lazy dog, again and again. " * 60


def test_what_one_worker_has_computed_another_need_not(fleet: Fleet, say: Say) -> None:
    manifest = smollm2(MODEL, prefill=None, decode=2)
    manifest["spec"]["kv"]["peers"] = "Auto"
    fleet.apply(manifest)
    fleet.wait_ready(MODEL)
    token = bearer_token(rings_of(fleet, MODEL)[names.API_KEY_FILE])
    pods = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in fleet.pods(MODEL, "unified")}
    holder, puller = sorted(pods)

    def host_of(pod: str) -> str:
        return f"[{pods[pod]}]" if ":" in pods[pod] else pods[pod]

    def ask(pod: str, prompt: str = PROMPT, **more: str) -> tuple[str, int, float]:
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0})
        headers = {"content-type": "application/json", names.HEADER_TOKEN: token} | more
        text, usage, seconds = json.loads(
            fleet.run_python(pod, "worker", ASK, json.dumps(headers), body, f"{host_of(pod)}:{names.WORKER_HTTP_PORT}")
        )
        return text, usage["prompt_tokens_details"]["cached_tokens"], seconds

    text, _, computing = ask(holder)
    pulled, cached, bringing = ask(puller, **{names.HEADER_KV_SOURCE: f"{host_of(holder)}:{names.WORKER_KV_PORT}"})
    say(f"computed in {computing:.2f} s, brought in {bringing:.2f} s: {cached} tokens")
    assert pulled == text
    assert cached > 500
    tiers = {tier["tier"]: tier for tier in fleet.telemetry(puller)["kvTiers"]}
    assert tiers["peer"]["tokensPerSecond"] > 0

    numbers, nobody = itertools.count(1), f"{host_of(puller)}:{NOBODY}"

    def is_told(status: str, reason: str) -> str:
        """Once the holder has asked somebody again who is not there; what the condition says."""
        if status == "False":
            short = f"{next(numbers)} {PROMPT[: len(PROMPT) // 4]}"  # a busy machine computes the whole in ten seconds
            assert ask(holder, short, **{names.HEADER_KV_SOURCE: nobody})[1] < 16
        told = fleet.condition(MODEL, "KVTiersReady")
        assert told is not None
        assert (told["status"], told["reason"]) == (status, reason), told
        return told["message"]

    until("both give each other blocks", lambda: is_told("True", "PeersInUse"), within=15)
    message = until("that one gets nothing is told", lambda: is_told("False", "PeersFailing"), within=60, every=1.0)
    say(message)
    assert f"{holder}: {nobody}: " in message
