"""A decode step of any family launches the same work whatever its tensors hold: the condition of recording it.

Kernels are noted instead of launched, with all that is not the content of a tensor. Reading a value on the host, which
a recording cannot repeat, is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_worker.engine.execute.cuda_graphs import build_static_batch
from tandem_worker.kernels import dispatch
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.contract import allocate_kv_cache
from tandem_worker.model.load import load_model
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from tests.tandem_worker.model.backends.test_backends import CASES, CONFIGS, QUANTIZED, quantize


class NoHostReads(TorchDispatchMode):
    """Refuses what would wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read on the host"
        assert func is not torch.ops.aten.nonzero.default, "a shape depends on values"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", CASES)
def test_a_decode_step_does_not_depend_on_content(
    family: str, save_random_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, method = QUANTIZED.get(family) or (CONFIGS[family], None)
    save_random_model(config())
    if method is not None:
        quantize(tmp_path, method)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, backend=BackendName.TRITON)
    launches: list[tuple[Any, ...]] = []

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        plain = [tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args]
        launches.append((kernel.__name__, grid, plain, sorted(options.items(), key=str)))

    monkeypatch.setattr(JITFunction, "run", note)
    monkeypatch.setattr(dispatch, "runs_on_triton", lambda tensor: True)
    cache = allocate_kv_cache(model.kv_cache_spec(4), 40, torch.device("cpu"))
    batch = build_static_batch(3, 8, 4, torch.device("cpu"))
    noted = []
    for position, fill in ((0, 0), (17, 5)):
        batch.token_ids.fill_(fill)
        batch.positions.fill_(position)
        batch.context_lens.fill_(position + 1)
        batch.block_tables.fill_(fill + 1)
        with torch.inference_mode(), NoHostReads():
            model.forward(batch, cache)
        noted.append(list(launches))
        launches.clear()
    assert noted[0] == noted[1]
    assert len(noted[0]) > 6
