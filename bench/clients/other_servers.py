"""vLLM's and SGLang's own tests of their OpenAI servers against Tandem: their files, other fixtures.

    make .cache/clients/other-servers/.synced
    .venv/bin/python -m bench.clients.other_servers vllm CHECKOUT [pytest's arguments]

Their server is a worker and a gateway on loopback with the demo's model, under the name that the test asks for.
docs/clients/other-servers.md has the results.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.clients.tokenizer import save_tokenizer

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".cache" / "clients" / "other-servers"
VLLM, SGLANG = Path("tests/entrypoints"), Path("test")
FILES = {
    "vllm": [
        VLLM / name
        for name in (
            "openai/chat_completion/test_chat.py",
            "openai/chat_completion/test_chat_completion.py",
            "openai/chat_completion/test_chat_echo.py",
            "openai/chat_completion/test_chat_logit_bias_validation.py",
            "openai/chat_completion/test_completion_with_function_calling.py",
            "openai/chat_completion/test_enable_force_include_usage.py",
            "openai/chat_completion/test_logprob_token_ids.py",
            "openai/completion/test_completion.py",
            "openai/completion/test_prompt_validation.py",
            "openai/completion/test_token_in_token_out.py",
            "openai/models/test_models.py",
            "openai/test_chunked_prompt.py",
            "openai/test_return_token_ids.py",
            "openai/test_return_tokens_as_ids.py",
            "anthropic/test_messages.py",
            "serve/instrumentator/test_basic.py",
            "serve/tokenize/test_tokenization.py",
            "openai/responses/test_basic.py",
            "openai/responses/test_errors.py",
            "openai/responses/test_function_call.py",
            "openai/responses/test_simple.py",
            "openai/responses/test_stateful.py",
            "openai/responses/test_structured_output.py",
        )
    ],
    "sglang": [
        SGLANG / name
        for name in (
            "registered/openai_server/basic/test_openai_server.py",
            "registered/openai_server/function_call/test_anthropic_tool_use.py",
            "registered/openai_server/function_call/test_openai_function_calling.py",
            "registered/openai_server/validation/test_large_max_new_tokens.py",
            "registered/openai_server/validation/test_matched_stop.py",
            "registered/openai_server/validation/test_request_length_validation.py",
            "manual/openai_server/features/test_cache_report.py",
            "manual/openai_server/features/test_continuous_usage_stats.py",
            "manual/openai_server/features/test_structural_tag.py",
            "manual/openai_server/function_call/test_tool_choice.py",
        )
    ],
}
"""Tests that ask a server with a language model over HTTP."""


NAMES = re.compile(
    r'"(Qwen|HuggingFaceH4|HuggingFaceTB|LiquidAI|facebook|meta-llama|mistralai|openai|openai-community|unsloth)/[^"/]+"'
)
SERVED = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The one model there is, in place of those that the tests name."""


def copy_tests(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for file in target.rglob("*.py"):
        text = file.read_text()
        if (changed := NAMES.sub(f'"{SERVED}"', text)) != text:
            file.write_text(changed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.clients.other_servers", description=__doc__)
    parser.add_argument("project", choices=FILES)
    parser.add_argument("checkout", type=Path)
    told, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, copy = Path(folder) / "tokenizer", Path(folder) / told.project
        save_tokenizer(tokenizer)
        for each in ("tests", "test", "python/sglang/test/kits"):
            if (told.checkout / each).exists():
                copy_tests(told.checkout / each, copy / each)
        environment = os.environ | {
            "TANDEM_ROOT": str(ROOT), "TANDEM_PYTHON": sys.executable, "TANDEM_TOKENIZER": str(tokenizer),
            "TANDEM_SERVED": SERVED, "PYTHONPATH": str(Path(__file__).parent / "stand_ins"), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        named = [argument for argument in arguments if argument.endswith(".py")]
        files = named or [str(file) for file in FILES[told.project]]
        command = [
            str(ENVIRONMENT / "bin" / "python"), "-m", "pytest", "-p", "stand_ins", "-p", "no:cacheprovider",
            "--confcutdir", str(VLLM if told.project == "vllm" else SGLANG), "--asyncio-mode", "auto",
            "--timeout", "120", "-o", "timeout_func_only=true", "--tb", "short", "-rA",
            *(each for each in arguments if each not in named), *files,
        ]  # fmt: skip
        sys.exit(subprocess.run(command, check=False, cwd=copy, env=environment).returncode)


if __name__ == "__main__":
    main()
