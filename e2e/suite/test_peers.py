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
answer = json.load(urllib.request.urlopen(request, timeout=100))
print(json.dumps([answer["choices"][0]["text"], answer["usage"], time.monotonic() - began]))
"""
LONGEST_SECONDS = 180
"""Three failures of a peer, with an answer that is computed for each, on a machine where that takes half a minute."""
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

    def ask(pod: str, prompt: str, **more: str) -> tuple[str, int, float]:
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0})
        headers = {"content-type": "application/json", names.HEADER_TOKEN: token} | more
        text, usage, seconds = json.loads(
            fleet.run_python(pod, "worker", ASK, json.dumps(headers), body, f"{host_of(pod)}:{names.WORKER_HTTP_PORT}")
        )
        return text, usage["prompt_tokens_details"]["cached_tokens"], seconds

    source, others = f"{host_of(holder)}:{names.WORKER_KV_PORT}", list[str]()
    tales = (f"Tale {number}. {PROMPT}" for number in itertools.count(1))

    def is_pulled() -> bool:
        """What one has computed the other brings, if a busy machine is not too late with it."""
        prompt = next(tales)
        text, _, computing = ask(holder, prompt)
        pulled, cached, bringing = ask(puller, prompt, **{names.HEADER_KV_SOURCE: source})
        say(f"computed in {computing:.2f} s, brought in {bringing:.2f} s: {cached} tokens")
        if pulled != text:  # who waits would take it for not yet
            others.append(f"{pulled!r} instead of {text!r}")
        return cached > 500

    until("one brings what the other has computed", is_pulled, within=LONGEST_SECONDS)
    assert not others
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

    until("both give each other blocks", lambda: is_told("True", "PeersInUse"), within=LONGEST_SECONDS)
    message = until(
        "that one gets nothing is told", lambda: is_told("False", "PeersFailing"), within=LONGEST_SECONDS, every=1.0
    )
    say(message)
    assert f"{holder}: {nobody}: " in message
