"""What the gateway says by itself, and what it learns of the model from a worker."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tandem_gateway.workers.model_card import read_card

from tests.tandem_gateway.conftest import send_json, until


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health(start_gateway: Any, start_worker: Any, path: str) -> None:
    async with httpx.AsyncClient() as client:
        running = await start_gateway(await start_worker())
        assert (await client.get(running.url + path)).status_code == 200
        assert (await client.post(running.url + path)).status_code == 405
        alone = await start_gateway()
        response = await client.get(alone.url + path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_endpoint")


async def test_version_and_load(start_gateway: Any, start_worker: Any) -> None:
    async with httpx.AsyncClient() as client:
        running = await start_gateway(await start_worker())
        assert (await client.get(f"{running.url}/version")).json()["version"]
        assert (await client.get(f"{running.url}/load")).json() == {"server_load": 0}


async def test_models_have_what_a_worker_tells(start_gateway: Any, start_worker: Any) -> None:
    worker = await start_worker()
    worker.card = {"id": "former name", "max_model_len": 2048, "root": "hf://a/b", "more": 1}
    running = await start_gateway(worker)
    async with httpx.AsyncClient() as client:
        await until(lambda: running.server.card.facts)
        (card,) = (await client.get(f"{running.url}/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"], card["root"], card["owned_by"]) == ("toy", 2048, "hf://a/b", "tandem")
    assert "more" not in card


def test_cards_are_read_with_care() -> None:
    card = {"data": [{"max_model_len": 5, "root": ["x"]}]}
    assert read_card(json.dumps(card).encode()) == {"max_model_len": 5}
    for bad in (b"", b"[]", b'{"data": []}', b'{"data": [3]}', b'{"data": 3}'):
        assert read_card(bad) is None


async def test_tokenizer_info_is_the_workers(start_gateway: Any, start_worker: Any) -> None:
    async def tell(_fake: Any, request: Any, writer: Any) -> None:
        assert (request.method, request.body) == ("GET", b"")
        await send_json(writer, 200, {"data": [], "eos_token": "</s>"})

    worker = await start_worker()
    worker.default = tell
    running = await start_gateway(worker)
    async with httpx.AsyncClient() as client:
        response = await client.get(f"{running.url}/tokenizer_info")
        assert response.json()["eos_token"] == "</s>"
        assert (await client.post(f"{running.url}/tokenizer_info", json={})).status_code == 405
