"""What a serving worker has imported, by package: what grows here grows every start."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httpx

MOST = {
    "torch": 690, "tandem_worker": 303, "numpy": 86, "cuda": 53, "pydantic": 46, "uvicorn": 27,
    "jinja2": 22, "prometheus_client": 20, "starlette": 17, "tokenizers": 15, "tandem_api": 16, "click": 13,
}  # fmt: skip
"""Modules by package. One that is not here may have `OTHERS`."""
OTHERS = 10
NEVER = (
    "triton",  # on a CPU
    *("transformers", "torch._dynamo", "torch._inductor", "torch._refs", "torch._decomp", "torch.masked._ops"),
    *("torch.distributions.normal", "torch.utils.data.dataloader", "sympy", "openai", "pytest", "hypothesis"),
)


TELLER = """
import sys, threading, time, pathlib
def tell():
    folder = pathlib.Path({folder!r})
    while not (folder / "asked").exists():
        time.sleep(0.05)
    (folder / "told.part").write_text("\\n".join(sorted(sys.modules)))
    (folder / "told.part").rename(folder / "told")
if "tandem_worker" in sys.orig_argv:
    threading.Thread(target=tell, daemon=True).start()
"""
"""Loaded before the worker, as `sitecustomize`: tells what is imported once it is asked."""


def test_modules_of_a_serving_worker(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(TELLER.format(folder=str(tmp_path)))
    told = {"PYTHONPATH": str(tmp_path / "site")}
    with workers.run(tmp_path, "unified", tiny_model, environment=told) as worker:
        workers.await_ready(worker)
        worker.complete("hello")
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert httpx.post(worker.url + "/v1/chat/completions", json=chat, timeout=60).status_code == 200
        (tmp_path / "asked").touch()
        workers.eventually((tmp_path / "told").exists, 30, "what is imported is told")
    found = set((tmp_path / "told").read_text().splitlines())
    assert "torch.nn" in found
    assert "tandem_worker.server.app" in found
    unwanted = [name for name in found if any(name == each or name.startswith(f"{each}.") for each in NEVER)]
    assert not unwanted
    counts = Counter(name.partition(".")[0] for name in found)
    counts = {package: count for package, count in counts.items() if package not in sys.stdlib_module_names}
    assert len(counts) <= 40, f"more packages than before: {sorted(counts)}"
    grown = {package: count for package, count in counts.items() if count > MOST.get(package, OTHERS)}
    assert not grown, f"these packages load more modules than before: {grown}"
