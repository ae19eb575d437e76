"""The one place that chooses what a model is built from: torch's operations, the CPU kernels, or the Triton kernels.

Torch's and Triton's run on any device, the kernels through their twins where no GPU is and Triton does not interpret,
so the wiring of one is tested against the other on a CPU.
"""

from __future__ import annotations

import torch

from tandem_worker.model.backends import native
from tandem_worker.model.backends.contract import Backend, BackendName


def find_backend(name: BackendName) -> Backend:
    """The backend of that name. Triton is imported only for its own."""
    if name is BackendName.TRITON:
        from tandem_worker.model.backends.triton.layers import TRITON

        return TRITON
    if name is BackendName.NATIVE:
        from tandem_worker.model.backends.native.backend import NATIVE

        return NATIVE
    from tandem_worker.model.backends.torch.layers import TORCH

    return TORCH


def select_backend(device: torch.device, dtype: torch.dtype) -> BackendName:
    """The Triton kernels on a GPU, the CPU kernels for bfloat16 where they run, torch elsewhere."""
    if device.type == "cuda":
        return BackendName.TRITON
    if dtype == torch.bfloat16 and native.find_obstacle() is None:
        return BackendName.NATIVE
    return BackendName.TORCH
