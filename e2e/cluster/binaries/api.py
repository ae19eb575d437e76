"""The few requests that `up` makes while a cluster comes to life: cheaper than starting kubectl for each look."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TIMEOUT = 2.0


class Api:
    """Requests to the API server with the administrator's certificate."""

    def __init__(self, pki: Path, node: str) -> None:
        self._server = f"https://{node}:6443"
        self._context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._context.load_cert_chain(pki / "admin.crt", pki / "admin.key")

    def get(self, path: str) -> str | None:
        """The body of a successful answer, None for anything else."""
        return http_body(self._server + path, self._context)

    def is_ready(self) -> bool:
        return self.get("/readyz") == "ok"

    def node_is_ready(self, name: str) -> bool:
        body = self.get(f"/api/v1/nodes/{name}")
        return body is not None and is_node_ready(json.loads(body))


def is_node_ready(node: dict[str, Any]) -> bool:
    """Ready, and no taint keeps pods away (the not-ready taint goes a moment later than the condition comes)."""
    conditions = node.get("status", {}).get("conditions", [])
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and not node["spec"].get("taints")


def http_body(url: str, context: ssl.SSLContext | None = None) -> str | None:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=TIMEOUT) as answer:
            return answer.read().decode()
    except (OSError, urllib.error.URLError):
        return None


def dns_answers(server: str, name: str) -> bool:
    """Whether the name server knows an IPv4 address for `name`."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.rstrip(".").split("."))
    query = struct.pack(">6H", 0x7A4D, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", 1, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(0.3)
        try:
            client.sendto(query, (server, 53))
            answer = client.recv(512)
        except OSError:
            return False
    _, flags, _, answers, _, _ = struct.unpack(">6H", answer[:12])
    return flags & 0xF == 0 and answers > 0


def connects(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False
