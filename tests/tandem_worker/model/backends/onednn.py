"""Where oneDNN packs weights as the CPU kernels read them: the CPU has products of bfloat16, and it may use them."""

import os

import pytest
import torch
from tandem_worker.model.backends import native


def lays_out_the_same() -> bool:
    """Whether its layout of bfloat16 is that of the kernels."""
    if native.find_obstacle() is not None or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    weight = torch.zeros(64, 64, dtype=torch.bfloat16).index_fill_(0, torch.tensor(5), 1.0)
    return native.packed_address(torch.ops.mkldnn._reorder_linear_weight(weight, 64), weight) is not None


may_choose = "ONEDNN_MAX_CPU_ISA" not in os.environ
"""Nothing keeps it from what the CPU has."""
needs_onednn = pytest.mark.skipif(
    not lays_out_the_same(), reason="oneDNN may not use products of bfloat16 here, and packs otherwise"
)
