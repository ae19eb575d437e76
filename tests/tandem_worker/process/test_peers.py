"""Worker processes that give each other what they have computed: the same tokens as one process, less computed."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tandem_worker.process.conftest import WorkerProcess, await_ready
from tests.tandem_worker.process.test_disaggregated import oracle, prompt_of


@pytest.fixture(scope="module")
def fleet(
    workers: SimpleNamespace, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """Two that do all themselves, a prefill and a decode worker: all give away what they have."""
    folder = tmp_path_factory.mktemp("peers")
    with ExitStack() as stack:

        def start(role: str, name: str) -> WorkerProcess:
            own = folder / name
            own.mkdir()
            kv = {"memoryBytes": 32 << 20, "peers": True}
            return stack.enter_context(workers.run(own, role, tiny_model, kv=kv))

        roles = {"one": "unified", "two": "unified", "prefill": "prefill", "decode": "decode"}
        started = {name: start(role, name) for name, role in roles.items()}
        yield SimpleNamespace(model=tiny_model, **{name: await_ready(worker) for name, worker in started.items()})


def ask(worker: WorkerProcess, prompt: list[int], **options: object) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were not computed."""
    answer = worker.complete(prompt, max_tokens=8, ignore_eos=True, return_token_ids=True, **options)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def until_in_time(attempt: Callable[[int], bool], seconds: float = 200) -> None:
    """`attempt` with one seed after another. Computing here takes milliseconds, and blocks that are 20 ms late are done
    without, their holder for a while too: on a busy machine that is no defect."""
    deadline = time.monotonic() + seconds
    for seed in itertools.count(1):
        if attempt(seed * 1000):
            return
        assert time.monotonic() < deadline, "no blocks came in time"
        time.sleep(0.2)


def read_from_peers(worker: WorkerProcess) -> float:
    return worker.metric("tandem_worker_kv_tier_tokens_total", tier="peer", direction="read")


def test_what_one_worker_has_computed_another_need_not(fleet: SimpleNamespace) -> None:
    def attempt(seed: int) -> bool:
        prompt = prompt_of(300, seed)
        tokens, _ = ask(fleet.one, prompt)
        assert tokens == oracle(fleet.model, prompt, 8)
        read, written = read_from_peers(fleet.two), given_away(fleet.one)
        answer, cached = ask(fleet.two, prompt, source=fleet.one.kv)
        assert answer == tokens
        assert cached <= read_from_peers(fleet.two) - read <= 288
        if cached == 288:
            assert given_away(fleet.one) - written == 288
        return cached == 288

    def given_away(worker: WorkerProcess) -> float:
        return worker.metric("tandem_worker_kv_tier_tokens_total", tier="peer", direction="written")

    until_in_time(attempt)


def test_a_decode_worker_brings_what_is_nearly_all_and_a_prefill_worker_what_is_not(fleet: SimpleNamespace) -> None:
    def nearly_all(seed: int) -> bool:
        prompt = prompt_of(400, seed + 2)
        answer, _ = ask(fleet.one, prompt)
        before = (read_from_peers(fleet.decode), read_from_peers(fleet.prefill))
        tokens, cached = ask(fleet.decode, prompt, prefill=fleet.prefill.kv, source=f"{fleet.one.kv};tokens=400")
        assert tokens == answer
        brought = read_from_peers(fleet.decode), read_from_peers(fleet.prefill)
        return (cached, brought) == (384, (before[0] + 384, before[1]))

    def a_third(seed: int) -> bool:
        longer = prompt_of(200, seed + 3) + prompt_of(400, seed + 4)
        ask(fleet.one, longer[:200])
        before = (read_from_peers(fleet.decode), read_from_peers(fleet.prefill))
        tokens, cached = ask(fleet.decode, longer, prefill=fleet.prefill.kv, source=fleet.one.kv)
        assert tokens == oracle(fleet.model, longer, 8)
        assert read_from_peers(fleet.decode) == before[0]
        return (cached, read_from_peers(fleet.prefill)) == (192, before[1] + 192)

    until_in_time(nearly_all)
    until_in_time(a_third)


def test_what_a_decode_worker_has_answered_need_not_be_computed_either(fleet: SimpleNamespace) -> None:
    def attempt(seed: int) -> bool:
        prompt = prompt_of(90, seed + 7)
        answer = fleet.decode.complete(prompt, max_tokens=200, ignore_eos=True, return_token_ids=True)
        turn = [*prompt, *answer["choices"][0]["token_ids"], *prompt_of(400, seed + 8)]
        tokens, cached = ask(fleet.one, turn, source=fleet.decode.kv)
        assert (tokens, 0) == ask(fleet.two, turn)
        return cached == 288

    until_in_time(attempt)


def test_a_worker_that_is_not_there_is_done_without(fleet: SimpleNamespace, workers: SimpleNamespace) -> None:
    prompt = prompt_of(200, seed=6)
    assert ask(fleet.two, prompt, source=f"127.0.0.1:{workers.free_port()}") == (oracle(fleet.model, prompt, 8), 0)


def test_what_is_no_address_is_refused_in_words(fleet: SimpleNamespace) -> None:
    with pytest.raises(AssertionError, match="x-tandem-kv-source must be one host:port"):
        ask(fleet.two, [1, 2, 3], source="10.0.0.7:7000, 10.0.0.8:7000")


def test_a_holder_that_is_stopped_or_killed_ends_no_stream(fleet: SimpleNamespace, workers: SimpleNamespace) -> None:
    prompts = [prompt_of(400, seed=20 + number) for number in range(3)]
    known = [ask(fleet.one, prompt)[0] for prompt in prompts]
    assert ask(fleet.two, prompts[2], source=fleet.one.kv)[0] == known[2], "whether its blocks came in time or not"
    workers.end(fleet.one, signal.SIGSTOP)
    try:
        assert ask(fleet.two, prompts[0], source=fleet.one.kv) == (known[0], 0)
    finally:
        workers.end(fleet.one, signal.SIGCONT)
    workers.end(fleet.one, signal.SIGKILL)
    workers.eventually(lambda: fleet.one.process.poll() is not None, 60, "it is dead")
    assert ask(fleet.two, prompts[1], source=fleet.one.kv) == (known[1], 0)
