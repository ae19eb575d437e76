"""Which sampler serves a device."""

from __future__ import annotations

import torch

from tandem_worker.engine.sample.contract import Sampler
from tandem_worker.engine.sample.host_sampler import HostSampler


def build_sampler(vocab_size: int, device: torch.device) -> Sampler:
    """The sampler that suits a device."""
    if device.type != "cuda":
        return HostSampler()
    from tandem_worker.engine.sample.device_sampler import DeviceSampler

    return DeviceSampler(vocab_size, device)
