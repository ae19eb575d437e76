"""What a serving worker has imported, by package: what grows here grows every start."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httpx

MOST = {
    "torch": 770, "tandem_worker": 320, "numpy": 95, "cuda": 55, "pydantic": 45, "triton": 45, "uvicorn": 28,
    "jinja2": 23, "prometheus_client": 21, "starlette": 18, "tandem_api": 15, "tokenizers": 15, "click": 13,
}  # fmt: skip
"""Modules by package, those of the isolated processes included. A package that is not here may have `OTHERS`."""
OTHERS = 10
NEVER = ("transformers", "torch._dynamo", "torch._inductor", "sympy", "openai", "pytest", "hypothesis")


def imported(log: str) -> set[str]:
    """Names of modules in what the interpreter tells of imports."""
    return set(re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", log, re.MULTILINE))


def test_modules_of_a_serving_worker(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    told = {"PYTHONPROFILEIMPORTTIME": "1"}
    with workers.run(tmp_path, "unified", tiny_model, environment=told) as worker:
        workers.await_ready(worker)
        worker.complete("hello")
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert httpx.post(worker.url + "/v1/chat/completions", json=chat, timeout=60).status_code == 200
        found = imported(worker.log.read_text())
    assert "torch.nn" in found
    assert "tandem_worker.server.app" in found
    unwanted = [name for name in found if any(name == each or name.startswith(f"{each}.") for each in NEVER)]
    assert not unwanted
    counts = Counter(name.partition(".")[0] for name in found)
    counts = {package: count for package, count in counts.items() if package not in sys.stdlib_module_names}
    assert len(counts) <= 60, f"more packages than before: {sorted(counts)}"
    grown = {package: count for package, count in counts.items() if count > MOST.get(package, OTHERS)}
    assert not grown, f"these packages load more modules than before: {grown}"
