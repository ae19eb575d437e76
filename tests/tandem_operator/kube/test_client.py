"""What goes to an API server and what comes back, over real HTTP."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from aiohttp import web
from api_double import api_client, serving
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.errors import APIError


@pytest.mark.parametrize(
    "text",
    [
        "ready \U0001f680",
        "\u6a21\u578b \u00fcn\u00efc\u00f6d\u00e9",
        "a\x7fb\x85c\u2028d\u2029e\ufefff\uffffg",
        "tab\tnew\nline \x01",
        "\\ud83d\\ude00 \\ \U0001f680",
        "'\"#: - {}",
    ],
)
async def test_what_is_applied_reads_the_same_as_yaml(text: str) -> None:
    """So the API server reads it, whatever people and programs write into templates and messages."""
    bodies: list[str] = []
    types: list[str] = []

    async def keep(request: web.Request) -> web.Response:
        bodies.append(await request.text())
        types.append(request.content_type)
        return web.json_response({})

    body: dict[str, Any] = {"metadata": {"annotations": {text: text}}, "n": 1, "f": 0.5, "no": None, "yes": [True, "1"]}
    async with serving(keep) as url:
        client = KubeClient(api_client(url, 1))
        await client.apply("/apis/x", body, force=True)
        await client.close()
    assert yaml.safe_load(bodies[0]) == body
    assert types == ["application/apply-patch+yaml"]


async def test_half_a_character_harms_nothing_else() -> None:
    bodies: list[str] = []

    async def keep(request: web.Request) -> web.Response:
        bodies.append(await request.text())
        return web.json_response({})

    async with serving(keep) as url:
        client = KubeClient(api_client(url, 1))
        await client.apply("/apis/x", {"a": "cut \ud83d", "b": "b"}, force=False)
        await client.close()
    assert yaml.safe_load(bodies[0]) == {"a": "cut \ufffd", "b": "b"}


@pytest.mark.parametrize("text", ["", "<html>sign in</html>", '{"kind": "Secr', "[]", "null"])
async def test_an_answer_that_is_no_object_is_an_error_like_others(text: str) -> None:
    """A proxy may answer in the API server's place. Callers know what to do about `APIError`."""

    async def answer(request: web.Request) -> web.Response:
        del request
        return web.Response(text=text, content_type="application/json")

    async with serving(answer) as url:
        client = KubeClient(api_client(url, 1))
        with pytest.raises(APIError, match="the answer to GET /apis/x is no object"):
            await client.find("/apis/x")
        await client.close()
