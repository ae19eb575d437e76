"""What an earlier start of the same model on a GPU of the same kind found out, so that this one need not.

A GPU's start measures activations by its largest step, and goes through steps of all sizes so that no kernel is
compiled while somebody waits. Where every kernel that this took is back, loading one takes milliseconds: then one small
step shows that the model computes, and what was measured is believed. Anything that decides kernels or measures is in
the name; kernels that are missing make the start an unknown one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_api.launch import WorkerConfig
from xxhash import xxh3_64_hexdigest

from tandem_worker.model.config import CONFIG_FILE
from tandem_worker.model.prepared.kernels import PreparedKernels, describe_sources
from tandem_worker.model.sources.digest import list_files

if TYPE_CHECKING:
    from tandem_worker.model.prepared.store import PreparedStore

logger = logging.getLogger(__name__)

LAYOUT = 2
_MOST_BYTES = 1 << 50
_DECIDING: Mapping[str, bool | set[str]] = {
    **dict.fromkeys(("role", "device", "dtype", "weights", "max_model_len", "scheduler", "speculative"), True),
    "kv": {"block_size", "memory_bytes", "host_memory_bytes"},
}
"""What of the configuration decides which steps there are, and what they take."""


class KnownStart:
    """Measures of one configuration of one model on one kind of GPU."""

    def __init__(self, store: PreparedStore, kernels: PreparedKernels, facts: Mapping[str, object]) -> None:
        """`facts` are what measures depend on beside the device and the kernels' sources, as JSON has it."""
        named = json.dumps({"layout": LAYOUT, "kernels": kernels.name, **facts}, sort_keys=True)
        self._name = f"start-{xxh3_64_hexdigest(named.encode())}"
        self._store, self._kernels = store, kernels
        self._measures: dict[str, int] = {}
        self.is_complete = False
        """All kernels are back that an earlier start compiled."""
        self._read()

    def _read(self) -> None:
        content = self._store.read(self._name)
        if content is None:
            return
        try:
            found = json.loads(content)
            needed, measures = frozenset(found["kernels"]), _read_sizes(dict(found["measures"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("what an earlier start measured cannot be read, so it is measured anew: %s", error)
            return
        if needed and needed <= self._kernels.restored:
            self._measures, self.is_complete = measures, True
            logger.info("an earlier start has measured this model here", extra={"kernels": len(needed)})

    def measure(self, name: str, run: Callable[[], int]) -> int:
        """What was measured under `name`, or else what `run` measures."""
        if name not in self._measures:
            self._measures[name] = run()
        return self._measures[name]

    def save(self) -> None:
        """Keep it, once all kernels are kept; nothing is to be kept of a start that was known."""
        if self.is_complete:
            return
        content = {"kernels": sorted(self._kernels.restored), "measures": self._measures}
        self._store.write(self._name, json.dumps(content).encode())


def find_known_start(
    store: PreparedStore,
    kernels: PreparedKernels,
    config: WorkerConfig,
    model: Path,
    *,
    records: bool,
    draft: Path | None = None,
) -> KnownStart:
    """What is known of the model in the folder or file `model` with the draft head in `draft`; `records`: decode steps
    are recorded."""
    import torch

    facts = {
        "model": [[_describe_file(*each) for each in list_files(path)] for path in (model, draft) if path is not None],
        "torch": torch.__version__,
        "sources": describe_sources(Path(__file__).parents[1]),
        "config": config.model_dump(mode="json", include=dict(_DECIDING)),
        "records": records,
    }
    return KnownStart(store, kernels, facts)


def _read_sizes(told: Mapping[str, object]) -> dict[str, int]:
    """As they are told. Raises ValueError for what are no sizes."""
    sizes = {name: size for name, size in told.items() if type(size) is int and 0 <= size < _MOST_BYTES}
    if len(sizes) < len(told):
        raise ValueError(f"{told} are no sizes")
    return sizes


def _describe_file(name: str, file: Path) -> str:
    """Weights by their size: two checkpoints that differ in nothing else differ in nothing that is measured."""
    return f"{name} {xxh3_64_hexdigest(file.read_bytes()) if name == CONFIG_FILE else file.stat().st_size}"
