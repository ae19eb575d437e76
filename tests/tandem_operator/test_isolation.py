"""What the operator must not pull in, shown in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; sys.stdout.write(' '.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_operator_imports_no_torch() -> None:
    assert not {"torch", "transformers", "numpy"} & modules_after("import tandem_operator.process.app")


def test_decisions_import_no_kubernetes_client() -> None:
    pure = (
        "import tandem_operator.children.plan, tandem_operator.reconcile.status, tandem_operator.workloads,"
        " tandem_operator.reconcile.transitions, tandem_operator.keys.rotation"
    )
    assert not {"kubernetes", "kopf", "aiohttp"} & modules_after(pure)
