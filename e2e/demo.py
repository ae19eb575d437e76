"""`make demo`: from nothing to a streamed answer through disaggregated prefill and decode.

Brings the cluster up, installs the chart with Helm, applies `examples/quickstart.yaml`, waits while showing what the
status says, and chats with the real OpenAI client from outside the cluster.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import openai

from e2e.cluster import connect
from e2e.install import NAMESPACE, ROOT, install_chart

MODEL = "smollm2"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
QUESTION = "What is the capital of France? Answer in one sentence."
FOLLOW_UP = "And which river flows through it? Answer in one sentence."
READY_LIMIT = 300


class Steps:
    """Prints numbered steps with the seconds each took."""

    def __init__(self) -> None:
        self.started = self.step_started = time.monotonic()
        self.number = 0

    def begin(self, what: str) -> None:
        self.number += 1
        self.step_started = time.monotonic()
        print(f"\n\033[1m[{self.number}] {what}\033[0m", flush=True)

    def done(self, note: str = "") -> None:
        print(f"    done in {time.monotonic() - self.step_started:.1f} s {note}", flush=True)


def main() -> int:
    steps = Steps()
    steps.begin("A Kubernetes cluster with Tandem's images")
    for command in ("up", "load"):
        subprocess.run([sys.executable, "-m", "e2e.cluster", command], check=True)
    cluster = connect()
    steps.done()

    steps.begin("helm install: the operator")
    install_chart(cluster)
    steps.done()

    steps.begin(f"kubectl apply -f {QUICKSTART.relative_to(ROOT)}")
    cluster.kubectl("apply", "-f", str(QUICKSTART))
    wait_ready(cluster)
    steps.done()

    steps.begin("A chat through the gateway, with the openai client, from outside the cluster")
    with cluster.service_url("default", MODEL, 80) as url:
        answer = chat(url.rstrip("/"))
    steps.done()
    print(describe_next(str(cluster.kubeconfig)))
    print(f"\nmake demo: {time.monotonic() - steps.started:.1f} s in all")
    if "Paris" not in answer:
        print("the answer does not contain Paris", file=sys.stderr)
        return 1
    return 0


def wait_ready(cluster: Any) -> None:
    """Show each change of the object's status line until it is ready. Raises RuntimeError when it stalls."""
    deadline = time.monotonic() + READY_LIMIT
    shown = ""
    while time.monotonic() < deadline:
        live = json.loads(cluster.kubectl("get", "inferencemodels.tandem.dev", MODEL, "-o", "json"))
        status = live.get("status", {})
        conditions = {c["type"]: c for c in status.get("conditions", [])}
        line = "    " + "  ".join(
            f"{role} {status.get(role, {}).get('summary', '-')}" for role in ("prefill", "decode", "gateway")
        )
        ready = conditions.get("Ready", {})
        line += f"  {ready.get('reason', 'Pending')}: {ready.get('message', 'the operator has not seen it yet')}"
        if line != shown:
            print(line, flush=True)
            shown = line
        current = status.get("observedGeneration") == live["metadata"]["generation"]
        if current and ready.get("status") == "True" and "Reconciling" not in conditions:
            return
        if conditions.get("Stalled", {}).get("status") == "True":
            raise RuntimeError(f"{MODEL} is stalled: {conditions['Stalled']['message']}")
        time.sleep(0.5)
    raise RuntimeError(f"{MODEL} was not ready within {READY_LIMIT} s; see kubectl describe im {MODEL}")


def chat(url: str) -> str:
    """Two turns; returns the first answer."""
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=120)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = stream_turn(api, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": FOLLOW_UP}]
    stream_turn(api, messages)
    return first


def stream_turn(api: openai.OpenAI, messages: list[Any]) -> str:
    print(f"\n    > {messages[-1]['content']}\n    ", end="", flush=True)
    started = time.monotonic()
    text, first, usage = "", 0.0, None
    with api.chat.completions.with_streaming_response.create(
        model=MODEL,
        messages=messages,
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as response:
        headers = response.headers
        for chunk in response.parse():
            if chunk.choices and (piece := chunk.choices[0].delta.content):
                first = first or time.monotonic()
                text += piece
                print(piece, end="", flush=True)
            usage = chunk.usage or usage
    ended = time.monotonic()
    if usage is None:
        raise RuntimeError("the stream ended without usage")
    rate = (usage.completion_tokens - 1) / (ended - first) if usage.completion_tokens > 1 else 0.0
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    print(
        f"\n    prefill pod {headers['x-tandem-prefill-worker']}, decode pod {headers['x-tandem-decode-worker']}\n"
        f"    TTFT {1000 * (first - started):.0f} ms, {rate:.1f} tokens/s; "
        f"{usage.prompt_tokens} prompt tokens ({cached} cached), {usage.completion_tokens} generated"
    )
    return text


def describe_next(kubeconfig: str) -> str:
    """What to type now."""
    return f"""
What to do next:
    export KUBECONFIG={kubeconfig}
    talk to it   kubectl port-forward svc/{MODEL} 8080:80 &
                 curl localhost:8080/v1/chat/completions -H 'content-type: application/json' \\
                   -d '{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    watch it     kubectl get im -w             kubectl describe im {MODEL}
                 kubectl -n {NAMESPACE} logs deploy/tandem-operator -f
    scale it     kubectl patch im {MODEL} --type merge -p '{{"spec": {{"decode": {{"replicas": 2}}}}}}'
    remove it    kubectl delete im {MODEL}; helm -n {NAMESPACE} uninstall tandem; make cluster-down"""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, subprocess.CalledProcessError, openai.OpenAIError) as error:
        print(f"\nmake demo failed: {error}", file=sys.stderr)
        sys.exit(1)
