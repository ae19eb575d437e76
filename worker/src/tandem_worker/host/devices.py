"""Which device and element type the configuration means. Torch is loaded when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem_api.launch import Device, DType

from tandem_worker.host.errors import StartupError

if TYPE_CHECKING:
    import torch


def resolve_device(device: Device, local_rank: int = 0) -> torch.device:
    """`local_rank` chooses among the GPUs of the pod. Raises StartupError."""
    import torch

    if device == "CPU" or (device == "Auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartupError(
            "DeviceUnavailable",
            "spec.engine.device is CUDA, but the container sees no GPU: ask for one in resources.limits, "
            "for example nvidia.com/gpu, or set the device to Auto or CPU.",
        )
    if local_rank >= torch.cuda.device_count():
        raise StartupError(
            "DeviceUnavailable",
            f"The container sees {torch.cuda.device_count()} GPUs, too few for a rank each: ask for as many in "
            "resources.limits as there are ranks in a pod.",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def check_host_memory(num_bytes: int, device_type: str) -> None:
    """Raises StartupError where blocks are to be kept in host memory below a device whose memory that is."""
    if num_bytes and device_type == "cpu":
        raise StartupError(
            "HostMemoryOnCPU",
            f"spec.kv.hostMemory is {num_bytes} bytes, but this worker computes on a CPU, whose blocks are in host "
            "memory already: leave it out, and give spec.kv.memory as much more.",
        )


def resolve_dtype(dtype: DType) -> torch.dtype | None:
    """None leaves the choice to the loader, which knows the checkpoint."""
    import torch

    return {"Auto": None, "BFloat16": torch.bfloat16, "Float16": torch.float16, "Float32": torch.float32}[dtype]
