"""Names of prompts: kept for a while, within bounds."""

from typing import Any

from tandem_api.telemetry import MAX_PROMPT_NAME, MAX_PROMPTS
from tandem_worker.server.wire.prompt_names import KEPT_SECONDS, MAX_BYTES, PromptNames


def test_names_are_told_for_a_while_oldest_first() -> None:
    now = [100.0]
    names = PromptNames(lambda: now[0])
    names.add("a" * 32)
    now[0] += KEPT_SECONDS / 2
    names.add("b" * 32 + "m-prefill-0")
    assert names.recent() == ["a" * 32, "b" * 32 + "m-prefill-0"]
    now[0] += 0.6 * KEPT_SECONDS
    assert names.recent() == ["b" * 32 + "m-prefill-0"]
    now[0] += KEPT_SECONDS
    assert names.recent() == []


def test_workers_without_a_name_of_their_own_go_by_their_addresses() -> None:
    names = PromptNames(lambda: 0.0)
    told = ["a" * 32 + address for address in ("10.0.0.7:8000", "[fd00::7]:8000", "gpu-1.rack_2:8000")]
    for name in told:
        names.add(name)
    assert names.recent() == told


def test_whatever_is_sent_the_sample_stays_small() -> None:
    names = PromptNames(lambda: 0.0)
    for bad in ("", " ", 'x"y', "é", "a\n", "x" * (MAX_PROMPT_NAME + 1)):
        names.add(bad)
    assert names.recent() == []
    for number in range(1000):
        names.add(f"{number:0{MAX_PROMPT_NAME}d}")
    kept = names.recent()
    assert sum(len(name) + 3 for name in kept) <= MAX_BYTES
    assert len(kept) <= MAX_PROMPTS
    assert kept[-1].endswith("999")


async def test_a_worker_tells_the_names_of_the_prompts_that_it_has_begun(start_worker: Any, tokenizer: Any) -> None:
    names = PromptNames(lambda: 0.0)
    async with start_worker(tokenizer, prompts=names) as worker:
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        for prompt, body in (("0a", ask), ("0b", ask | {"model": "another"}), (None, ask)):
            worker.says("x")
            headers = {} if prompt is None else {"x-tandem-prompt": prompt}
            await worker.http.post("/v1/chat/completions", json=body, headers=headers)
    assert names.recent() == ["0a"]
