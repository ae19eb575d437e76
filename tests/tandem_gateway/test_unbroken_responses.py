"""Real workers are killed and told to end under streams that the `openai` client reads, of responses that are kept."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import openai
from openai.types.responses import Response
from tandem_api.launch import StoreLimits

from tests.tandem_gateway.chaos import ANSWER_SECONDS, MODEL, Fleet, find_difference, open_fleet
from tests.tandem_gateway.conftest import until
from tests.tandem_worker.process.forking import Forker
from tests.tandem_worker.server.test_resume import ID, KINDS

EXTENSIONS = ("ignore_eos", "seed", "logit_bias", "chat_template_kwargs")
ASKED = ("response", "response with reasoning", "response with calls", "response with logprobs")
SEEDS = 2


def ask(kind: str, seed: int) -> dict[str, Any]:
    body = {key: value for key, value in KINDS[kind][1].items() if key != "stream"} | {"seed": seed, "model": MODEL}
    if "ignore_eos" in body:
        body["max_output_tokens"] = 250
    return body | {"extra_body": {key: body.pop(key) for key in EXTENSIONS if key in body}}


def compare(one: Response, other: Response) -> str | None:
    """Where two answers of one request differ, but for what belongs to one of them: ids, times, what was cached."""

    def reduce(answer: Response) -> dict[str, Any]:
        plain = answer.to_dict()
        for key in ("id", "created_at", "completed_at", "store"):
            plain.pop(key)
        plain["usage"]["input_tokens_details"] = None
        for item in plain["output"]:
            assert ID.fullmatch(item.pop("id"))
            item.pop("call_id", None)
        return plain

    return find_difference(reduce(one), reduce(other))


async def read_stream(client: openai.AsyncOpenAI, begun: asyncio.Event, body: dict[str, Any]) -> Response:
    """The last event's response, once it is certain that the events before it say the same."""
    numbers: list[int] = []
    texts: dict[str, str] = {}
    items: dict[str, Any] = {}
    heads: set[tuple[str, float]] = set()
    last: Any = None
    async for last in await client.responses.create(stream=True, **body):
        numbers.append(last.sequence_number)
        match last.type:
            case "response.output_item.added":
                assert last.output_index == len(items)
                texts[last.item.id] = ""
                items[last.item.id] = None
            case "response.output_item.done":
                items[last.item.id] = last.item.to_dict()
            case kind if kind.endswith(".delta"):
                texts[last.item_id] += last.delta
                if len(numbers) > 8:
                    begun.set()
            case "response.created" | "response.in_progress" | "response.completed" | "response.incomplete":
                heads.add((last.response.id, last.response.created_at))
            case _:
                pass
    assert numbers == list(range(len(numbers)))
    assert last.type in ("response.completed", "response.incomplete"), last
    answer: Response = last.response
    assert heads == {(answer.id, answer.created_at)}
    assert [items[item.id] for item in answer.output] == [item.to_dict() for item in answer.output]
    for item in answer.output:
        assert texts[item.id] == (item.arguments if item.type == "function_call" else item.content[0].text)
    return answer


async def check_kept(client: openai.AsyncOpenAI, seen: Response) -> None:
    kept, told = (await client.responses.retrieve(seen.id)).to_dict(), seen.to_dict()
    for item in told["output"]:
        for part in item.get("content", []):
            if "logprobs" in part:
                part["logprobs"] = []
    assert kept == told


async def run(client: openai.AsyncOpenAI, bodies: list[dict[str, Any]], begun: asyncio.Event) -> list[Response]:
    return await asyncio.gather(*[read_stream(client, begun, body) for body in bodies])


async def strike(fleet: Fleet, client: openai.AsyncOpenAI, number: int, bodies: list[dict[str, Any]]) -> list[Response]:
    """Streams of all kinds, and a signal to a worker in their middle."""
    begun = asyncio.Event()
    running = asyncio.create_task(run(client, bodies, begun))
    await asyncio.wait_for(begun.wait(), ANSWER_SECONDS)
    await until(lambda: fleet.streams_of(fleet.busiest()) >= 3, wait=60)
    name = fleet.busiest()
    fleet.send(name, number)
    seen = await running
    await asyncio.to_thread(fleet.workers[name].process.wait, 120)
    await fleet.remove(name)
    await fleet.add()
    return seen


async def test_responses_outlive_their_workers_and_are_kept_as_seen(forker: Forker) -> None:
    store = StoreLimits(max_bytes=16 << 20, ttl_seconds=600)
    options: dict[str, Any] = {"idle_seconds": 100.0, "first_token_seconds": 100.0}
    async with open_fleet(2, forker, response_store=store, **options) as fleet:
        resumes = fleet.gateway.metrics.resumes
        bodies = [ask(kind, seed) for kind in ASKED for seed in range(SEEDS)]
        url = f"{fleet.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0, timeout=ANSWER_SECONDS) as client:
            undisturbed = await run(client, bodies, asyncio.Event())
            for cause, number in (("reset", signal.SIGKILL), ("draining", signal.SIGTERM)):
                for _ in range(5):
                    seen = await strike(fleet, client, number, bodies)
                    for one, other in zip(undisturbed, seen, strict=True):
                        assert not (difference := compare(one, other)), difference
                        assert other.to_dict()["store"] is True
                        await check_kept(client, other)
                    if resumes[cause]:
                        break
                assert resumes[cause], resumes
                again = await client.responses.create(
                    model=MODEL, input="And?", previous_response_id=seen[0].id, max_output_tokens=5
                )
                assert again.usage is not None
                assert undisturbed[0].usage is not None
                assert again.usage.input_tokens > undisturbed[0].usage.input_tokens + 100
            assert not fleet.gateway.metrics.failed_resumes
        await until(lambda: not fleet.gateway.exchanges, wait=30)
