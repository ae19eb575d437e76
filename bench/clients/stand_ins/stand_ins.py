"""A pytest plugin: the server of vLLM's or SGLang's tests is Tandem, whatever model they name.

It runs in the environment of those tests, not in Tandem's: Tandem is started through `TANDEM_PYTHON` in `TANDEM_ROOT`.
What the tests import of the other project is a fixture, which is here, or `Absent`: a test that uses it is skipped.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import socket
import subprocess
import sys
import types
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import transformers

ROOT, PYTHON = os.environ["TANDEM_ROOT"], os.environ["TANDEM_PYTHON"]
CONTEXT = min(8192, int(os.environ.get("TANDEM_CONTEXT", "8192")))
"""Tokens that the demo's model can take, or fewer: what an answer without `max_tokens` ends at."""
SERVED = os.environ["TANDEM_SERVED"]
"""The name of the one model there is."""
LENGTH_FLAGS = ("--max-model-len", "--max_model_len", "--context-length")
TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser")
"""Who runs a server with these wants a free choice of tools, which the demo's model has in the generic form alone."""
OTHERS = ("vllm", "sglang", "torch")
"""Packages that the tests import and their environment lacks. transformers is imported before: it looks for torch."""
KITS = "sglang.test.kits."
"""Modules of SGLang that have tests in them: these are theirs."""


_held: list[socket.socket] = []


def free_port() -> int:
    """As that of `tests/ports.py`, which this environment does not have."""
    _held.append(socket.socket())
    _held[-1].bind(("0.0.0.0", 0))
    _held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _held[-1].getsockname()[1]


class Stack:
    """A worker and a gateway that serve the demo's model under any name."""

    def __init__(self, name: str, length: int, tools: str, port: int) -> None:
        self.port = port
        self.process = subprocess.Popen(
            [
                PYTHON, "-m", "tests.clients.stack", "--unified", "--served-name", name, "--port", str(port),
                "--max-model-len", str(length), "--tools", tools, "--free-form-grammars", "--response-store",
            ],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        )  # fmt: skip
        assert self.process.stdout is not None
        try:
            started = self.process.stdout.readline()
        except BaseException:  # pytest's timeout
            self.stop()
            raise
        if not started:
            raise RuntimeError(f"Tandem did not start: exit code {self.process.wait()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def context_length(flags: Sequence[str]) -> int:
    told = dict(itertools.pairwise(flags))
    return min(CONTEXT, *(int(told[flag]) for flag in LENGTH_FLAGS if flag in told), CONTEXT)


def tool_form(flags: Sequence[str]) -> str:
    return "Generic" if {flag.partition("=")[0] for flag in flags} & set(TOOL_FLAGS) else "Auto"


_shared: dict[tuple[str, int, str], Stack] = {}


def shared_stack(name: str, flags: Sequence[str], port: int | None = None) -> Stack:
    """A stack for these flags. It stays for the next that wants the same: starting takes longer than most tests."""
    told = name, context_length(flags), tool_form(flags)
    if told not in _shared:
        stop_shared()
        _shared[told] = Stack(*told, port or free_port())
    return _shared[told]


@atexit.register
def stop_shared() -> None:
    while _shared:
        _shared.popitem()[1].stop()


class RemoteOpenAIServer:
    """vLLM's fixture of this name. Flags beside the context's length say nothing to Tandem."""

    DUMMY_API_KEY = "token"

    def __init__(self, model: str, flags: Sequence[str], **_: Any) -> None:
        told = dict(itertools.pairwise(flags))
        name = told.get("--served-model-name", model)
        self.host, self.port = "127.0.0.1", shared_stack(name, flags).port

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        """`shared_stack` ends it."""

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **told: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **told)

    def get_async_client(self, **told: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **told)

    def get_client_anthropic(self, **told: Any) -> Any:
        return importlib.import_module("anthropic").Anthropic(
            base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **told
        )

    def get_async_client_anthropic(self, **told: Any) -> Any:
        return importlib.import_module("anthropic").AsyncAnthropic(
            base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **told
        )


class Absent:
    """Something of the other project that is no fixture. A test that uses it is about that project's own code."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: object, **__: object) -> Any:
        pytest.skip(f"{self.__name__} is a part of the other server")

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        pytest.skip(f"{self.__name__} is a part of the other server")

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return ()


def absent_from(module: str, attribute: str) -> Absent:
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    return Absent(f"{module}.{attribute}")


def get_tokenizer(*_: object, **__: object) -> Any:
    return transformers.AutoTokenizer.from_pretrained(os.environ["TANDEM_TOKENIZER"])


def popen_launch_server(
    model: str, base_url: str, timeout: float = 0, other_args: Sequence[object] = (), **_: object
) -> Stack:
    return shared_stack(model, [str(each) for each in other_args], int(base_url.rsplit(":", 1)[1]))


def kill_process_tree(pid: int) -> None:
    """SGLang's tests end their server with this; `shared_stack` does."""


FIXTURES: dict[str, dict[str, Any]] = {
    "tests.utils": {"RemoteOpenAIServer": RemoteOpenAIServer, "ROCM_EXTRA_ARGS": [], "ROCM_ENV_OVERRIDES": {}},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.transformers_utils.repo_utils": {
        "hf_api": lambda: types.SimpleNamespace(snapshot_download=lambda *_, **__: "")
    },
    "vllm.version": {"__version__": "another server's"},
    "vllm.platforms": {"current_platform": types.SimpleNamespace(is_rocm=lambda: False, is_cpu=lambda: True)},
    "sglang.srt.utils": {"kill_process_tree": kill_process_tree},
    "sglang.srt.utils.hf_transformers_utils": {"get_tokenizer": get_tokenizer},
    "sglang.test.ci.ci_register": {
        name: (lambda **_: None) for name in ("register_amd_ci", "register_cuda_ci", "register_cpu_ci")
    },
    "sglang.test.test_utils": {
        "CustomTestCase": unittest.TestCase,
        "DEFAULT_MODEL_NAME_FOR_TEST": SERVED,
        "DEFAULT_SMALL_MODEL_NAME_FOR_TEST": SERVED,
        "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": 600,
        "DEFAULT_URL_FOR_TEST": f"http://127.0.0.1:{free_port()}",
        "popen_launch_server": popen_launch_server,
        "is_rust_server_built": lambda: False,
        "is_in_ci": lambda: False,
    },
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(KITS):
            file = Path.cwd() / "python" / f"{fullname.replace('.', '/')}.py"
            return importlib.util.spec_from_file_location(fullname, file)
        if fullname in FIXTURES or fullname.partition(".")[0] in OTHERS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        module.__dict__.update(FIXTURES.get(name, {}))
        module.__dict__["__getattr__"] = lambda attribute: absent_from(name, attribute)


sys.meta_path.insert(0, Finder())
