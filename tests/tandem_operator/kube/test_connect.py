"""How the operator reaches the API server, over real HTTP."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from aiohttp import web
from api_double import serving
from kubernetes.aio.config import kube_config
from tandem_operator.kube.client import connect, proxy_of

_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*_VARIABLES, *(name.upper() for name in _VARIABLES), "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


async def ask(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What comes of one request to the API server of a kubeconfig."""
    content = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(json.dumps(content))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    connections = await connect()
    try:
        return await connections.requests.get("/version")
    finally:
        await connections.close()


async def tell_host(request: web.Request) -> web.Response:
    return web.json_response({"host": request.headers["Host"]})


async def test_requests_go_through_the_proxy_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tell_host) as url:
        monkeypatch.setenv("HTTP_PROXY", url)
        assert await ask("http://api.invalid", tmp_path, monkeypatch) == {"host": "api.invalid"}


async def test_a_request_waits_for_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    async with serving(tell_host) as url:
        await ask(url, tmp_path, monkeypatch)
    assert set(threading.enumerate()) <= before


def test_what_needs_no_proxy_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "10.96.0.1,.cluster.local")
    assert proxy_of("https://api.example.com:6443") == "http://proxy:3128"
    assert proxy_of("https://10.96.0.1:443") is None
    assert proxy_of("https://kubernetes.default.svc.cluster.local") is None
    assert proxy_of("http://api.example.com") is None
