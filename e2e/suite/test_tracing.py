"""A model whose gateway and workers send the spans of requests to a collector."""

from __future__ import annotations

import json
import secrets

import pytest

from e2e.suite.fleet import Fleet, Object, Say, is_ready, smollm2, until

MODEL = "traced"
PORT = 4318
COLLECT = """
import gzip, http.server, json, socket
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SPANS = []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            said = {each.key: each.value.string_value for each in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                SPANS.append({
                    "name": span.name, "trace": span.trace_id.hex(), "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(), "pod": said.get("k8s.pod.name", ""),
                })
        self.answer(b"")

    def do_GET(self):
        self.answer(json.dumps(SPANS).encode())

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET


Server(("", %d), Handler).serve_forever()
"""


def start_collector(fleet: Fleet, image: str) -> None:
    """A pod that keeps the spans it is sent, and a Service of it. `image` has OpenTelemetry's messages."""
    labels = {"app": "collector"}
    container: Object = {
        "name": "collector",
        "image": image,
        "command": ["python3", "-c", COLLECT % PORT],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "readinessProbe": {"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1},
        "securityContext": {
            "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True,
            "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    pod = {"metadata": {"name": "collector", "labels": labels}, "spec": {"containers": [container]}}
    service = {"metadata": {"name": "collector"}, "spec": {"selector": labels, "ports": [{"port": PORT}]}}
    fleet.kubernetes.request("POST", fleet.path("pods"), pod)
    fleet.kubernetes.request("POST", fleet.path("services"), service)
    until("the collector is up", lambda: is_ready(fleet.get("pods", "collector")), within=240)


def read_spans(fleet: Fleet, trace: str) -> list[Object]:
    found = fleet.kubernetes.request("GET", fleet.path("pods", f"collector:{PORT}") + "/proxy/")
    return [span for span in (json.loads(found) if isinstance(found, str) else found) if span["trace"] == trace]


@pytest.mark.timeout(1200)
def test_the_spans_of_a_request_are_one_tree(fleet: Fleet, say: Say) -> None:
    endpoint = f"http://collector.{fleet.namespace}.svc:{PORT}"
    fleet.apply(smollm2(MODEL, observability={"tracing": {"endpoint": endpoint}}))
    fleet.wait_ready(MODEL, within=300)
    (gateway,) = fleet.pods(MODEL, "gateway")
    start_collector(fleet, gateway["spec"]["containers"][0]["image"])

    trace = secrets.token_hex(16)
    with fleet.openai(MODEL) as api:
        # So long that a decode worker does not compute it itself.
        asked: Object = {"model": MODEL, "prompt": "The sea is wide and the sky is high. " * 60, "max_tokens": 12}
        streamed = api.completions.create(
            **asked, stream=True, temperature=0.0,
            extra_headers={"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"},
        )  # fmt: skip
        text = "".join(each.choices[0].text for each in streamed if each.choices)
        assert text == api.completions.create(**asked, temperature=0.0).choices[0].text

    def is_tree() -> list[Object]:
        spans = read_spans(fleet, trace)
        names = {span["name"] for span in spans}
        assert {f"text_completion {MODEL}", "route", "remote prefill", "prefill", "kv send", "decode"} <= names, names
        known = {span["id"] for span in spans}
        roots = [span["name"] for span in spans if span["parent"] not in known]
        assert roots == [f"text_completion {MODEL}"], roots  # others' parents may be on their way
        assert len({span["pod"] for span in spans}) == 3, "the gateway, the prefill and the decode worker"
        return spans

    spans = until("every part of the request is in one tree", is_tree, within=180)
    say(f"a stream, told in {len(spans)} spans of three pods")
