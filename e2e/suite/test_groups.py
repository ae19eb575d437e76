"""Replicas of several ranks and pods: they answer as one process does, come and go as a whole, and recover."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from e2e.suite import test_answers
from e2e.suite.conftest import make_namespace
from e2e.suite.fleet import Fleet, Kubernetes, Object, is_ready, smollm2, until
from e2e.suite.load import LoadOutcome, stream_once
from e2e.suite.test_answers import NEW_TOKENS, WORDS, assert_same
from e2e.suite.test_faults import SHARED_PROCESSES, restarts

oracle = test_answers.oracle

MODEL = "group"
NODES = 2
SPACE = {"memory": "128Mi"}
"""Of each rank: nearly 3,000 tokens even where it holds every head of every layer."""
PROMPT_LENGTHS = (1, 16, 17, 33, 150, 400)


@pytest.fixture(scope="module")
def staged(tandem: Any, kubernetes: Kubernetes) -> Iterator[Fleet]:
    """Model `group`: one replica of two stages in two pods."""
    made = make_namespace(tandem, kubernetes, f"e2e-staged-{uuid.uuid4().hex[:5]}")
    manifest = smollm2(MODEL, prefill=None, kv=SPACE)
    manifest["spec"]["decode"] |= {
        "nodesPerReplica": NODES, "parallelism": {"pipeline": NODES}, "podTemplate": SHARED_PROCESSES
    }  # fmt: skip
    made.apply(manifest)
    made.wait_ready(MODEL)
    yield made
    kubernetes.request("DELETE", f"/api/v1/namespaces/{made.namespace}")


def workers(fleet: Fleet) -> list[Object]:
    """The pods of the group by name."""
    return sorted(fleet.pods(MODEL, "unified"), key=lambda pod: pod["metadata"]["name"])


def assert_greedy(fleet: Fleet, model: str, oracle: tuple[Any, Any]) -> None:
    """Prompts below, at and above a block boundary, answered as transformers answers them."""
    with fleet.openai(model) as api:
        for length in PROMPT_LENGTHS:
            rng = random.Random(f"group {length}")
            text = "".join(rng.choice(WORDS) for _ in range(length + 8))
            prompt = oracle[1](text)["input_ids"][:length]
            response = api.completions.create(
                model=model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, extra_body={"return_token_ids": True}
            )
            assert_same(list((response.choices[0].model_extra or {})["token_ids"]), oracle, prompt)


async def ask_once(url: str) -> LoadOutcome:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as api:
        return await stream_once(api, MODEL, "Are you there? Answer with one word.", 4, 60)


def test_two_stages_in_two_pods_answer_as_one_process(staged: Fleet, oracle: tuple[Any, Any]) -> None:
    assert [pod["metadata"]["name"] for pod in workers(staged)] == [f"{MODEL}-decode-0", f"{MODEL}-decode-1"]
    assert_greedy(staged, MODEL, oracle)


def test_replicas_are_counted_and_only_the_leader_is_asked(staged: Fleet) -> None:
    status = staged.wait_ready(MODEL)["status"]["decode"]
    assert (status["replicas"], status["ready"], status["updated"], status["summary"]) == (1, 1, 1, "1/1")
    with staged.openai(MODEL) as api:
        raw = [
            api.chat.completions.with_raw_response.create(
                model=MODEL, messages=[{"role": "user", "content": f"Count to {number}."}], max_tokens=2
            )
            for number in range(4)
        ]
    assert {answer.headers["x-tandem-decode-worker"] for answer in raw} == {f"{MODEL}-decode-0"}


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_killed_pod_takes_its_group_down_and_the_group_comes_back(
    staged: Fleet, oracle: tuple[Any, Any], node: int
) -> None:
    staged.wait_ready(MODEL)
    victim = workers(staged)[node]["metadata"]["name"]
    before = restart_count(staged, victim)
    staged.send_signal(victim, "SIGKILL")
    until("the killed container to be ready again", lambda: restarts(staged, victim) > before, within=180)
    staged.wait_role(MODEL, "unified", NODES)
    staged.wait_ready(MODEL)
    with staged.url(MODEL) as url:
        until("a new request to succeed", lambda: asyncio.run(ask_once(url)).complete, within=60)
    assert_greedy(staged, MODEL, oracle)
    staged.wait_blocks_free(MODEL)


def restart_count(fleet: Fleet, pod: str) -> int:
    return fleet.get("pods", pod)["status"]["containerStatuses"][0]["restartCount"]


def test_scaling_adds_and_removes_whole_groups(staged: Fleet) -> None:
    staged.wait_ready(MODEL)
    first = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in workers(staged)}
    staged.patch(MODEL, {"decode": {"replicas": 2}})
    staged.wait_role(MODEL, "unified", 2 * NODES)
    staged.wait_ready(MODEL)
    assert staged.get("inferencemodels", MODEL)["status"]["decode"]["summary"] == "2/2"
    staged.patch(MODEL, {"decode": {"replicas": 1}})
    staged.wait_role(MODEL, "unified", NODES)
    staged.wait_ready(MODEL)
    assert {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in workers(staged)} == first


@pytest.mark.timeout(600)
def test_a_changed_configuration_replaces_the_group_as_a_whole(staged: Fleet, oracle: tuple[Any, Any]) -> None:
    staged.wait_ready(MODEL)
    before = {pod["metadata"]["uid"] for pod in workers(staged)}
    staged.patch(MODEL, {"engine": {"maxBatchTokens": 1024}})

    def replaced() -> bool:
        pods = workers(staged)
        hashes = {pod["metadata"]["annotations"]["tandem.dev/config-hash"] for pod in pods}
        assert [is_ready(pod) for pod in pods] == [True] * NODES
        assert not before & {pod["metadata"]["uid"] for pod in pods}
        assert len(hashes) == 1, hashes
        return True

    # A second group comes up first, then the one of before is replaced.
    until("every pod of the group to be a new one", replaced, within=360)
    staged.wait_ready(MODEL)
    assert_greedy(staged, MODEL, oracle)


@pytest.mark.full
def test_suspend_and_resume_a_group(staged: Fleet) -> None:
    staged.patch(MODEL, {"suspend": True})
    until("every pod to be gone", lambda: not staged.pods(MODEL), within=120)
    staged.patch(MODEL, {"suspend": False})
    staged.wait_ready(MODEL)
    with staged.url(MODEL) as url:
        until("a new request to succeed", lambda: asyncio.run(ask_once(url)).complete, within=60)


def test_prefill_and_decode_may_be_spread_differently(fleet: Fleet, oracle: tuple[Any, Any]) -> None:
    """Blocks of three tensor ranks in one pod are cut anew for two stages in two pods."""
    manifest = smollm2("resliced", kv=SPACE)
    manifest["spec"]["prefill"]["parallelism"] = {"tensor": 3}
    manifest["spec"]["decode"] |= {"nodesPerReplica": NODES, "parallelism": {"pipeline": NODES}}
    fleet.apply(manifest)
    fleet.wait_ready("resliced")
    assert_greedy(fleet, "resliced", oracle)
    with fleet.openai("resliced") as api:
        raw = api.chat.completions.with_raw_response.create(
            model="resliced",
            messages=[{"role": "user", "content": "Name the pods that served this, in a few careful words, please."}],
            max_tokens=2,
        )
    assert raw.headers["x-tandem-prefill-worker"] == "resliced-prefill-0"
    assert raw.headers["x-tandem-decode-worker"] == "resliced-decode-0"
    fleet.wait_blocks_free("resliced")


def one_pod_of_three_ranks(name: str) -> Object:
    """SmolLM2 has 9 heads and 3 heads of keys and values: three ranks have the same share of both."""
    manifest = smollm2(name, prefill=None, kv=SPACE)
    manifest["spec"]["decode"]["parallelism"] = {"tensor": 3}
    return manifest


@pytest.mark.timeout(900)
def test_three_ranks_in_one_pod_then_one_then_gone(fleet: Fleet, oracle: tuple[Any, Any]) -> None:
    """Turned on, seen working, undone, deleted: one object all along."""
    fleet.apply(one_pod_of_three_ranks("split"))
    fleet.wait_ready("split")
    assert len(fleet.pods("split", "unified")) == 1
    assert_greedy(fleet, "split", oracle)
    fleet.apply(smollm2("split", prefill=None, kv=SPACE))

    def single() -> bool:
        pods = fleet.pods("split", "unified")
        assert [is_ready(pod) for pod in pods] == [True]
        return [port["name"] for port in pods[0]["spec"]["containers"][0]["ports"]] == ["http", "metrics", "kv"]

    until("a pod of one rank", single, within=480)
    fleet.wait_ready("split")
    assert_greedy(fleet, "split", oracle)
    fleet.delete("inferencemodels", "split")
    until("every child to be gone", lambda: not fleet.children("split") and not fleet.pods("split"), within=120)
