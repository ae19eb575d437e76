"""What the operator must not pull in, shown in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; sys.stdout.write(' '.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_operator_imports_no_torch() -> None:
    assert not {"torch", "transformers", "numpy"} & modules_after("import tandem_operator.app")


def test_decisions_import_no_kubernetes_client() -> None:
    pure = (
        "import tandem_operator.planner, tandem_operator.status, tandem_operator.workloads,"
        " tandem_operator.transitions, tandem_operator.rotation"
    )
    assert not {"kubernetes", "kopf", "aiohttp"} & modules_after(pure)
