"""How large the block space is, and how long a request may be in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tandem_worker.errors import StartupError

if TYPE_CHECKING:
    import torch
    from tandem_api.launch import WorkerConfig

    from tandem_worker.models.base import CausalLM

_GIB = 1024**3
_CUDA_FRACTION = 0.85
"""Of the VRAM that is free after loading; the rest is for activations, graphs and the allocator's slack."""
_CPU_FRACTION = 0.25
_CPU_LIMIT = 4 * _GIB


def plan_num_blocks(memory_bytes: int, bytes_per_block: int) -> int:
    """Blocks that fit, block 0 included."""
    num_blocks = memory_bytes // bytes_per_block
    if num_blocks < 2:
        raise StartupError(
            "KVCacheTooSmall",
            f"the KV cache has {memory_bytes} bytes, but one block takes {bytes_per_block} and two are the least; "
            "raise kv.memory_bytes or the memory limit of the pod",
        )
    return num_blocks


def plan_num_host_blocks(memory_bytes: int, bytes_per_block: int, available_bytes: int) -> int:
    """Blocks of preempted requests that the host keeps; 0 when none are wanted."""
    if not memory_bytes:
        return 0
    if memory_bytes < bytes_per_block:
        raise StartupError(
            "HostKVTooSmall",
            f"kv.host_memory_bytes is {memory_bytes}, but one block takes {bytes_per_block}; raise it, or set it to 0",
        )
    if memory_bytes > available_bytes:
        raise StartupError(
            "HostKVTooLarge",
            f"kv.host_memory_bytes is {memory_bytes}, but {available_bytes} bytes of host memory are free; lower it, "
            "or raise the memory limit of the pod",
        )
    return memory_bytes // bytes_per_block


def plan_max_model_len(wanted: int | None, supported: int, num_blocks: int, block_size: int) -> int:
    """Longest prompt plus output of one request."""
    capacity = (num_blocks - 1) * block_size
    if wanted is None:
        return min(supported, capacity)
    if wanted > supported:
        raise StartupError("MaxModelLenTooLong", f"maxModelLen is {wanted}, but the model supports {supported} tokens")
    if wanted > capacity:
        raise StartupError(
            "KVCacheTooSmall", f"maxModelLen is {wanted}, but the KV cache holds {capacity} tokens; give it more memory"
        )
    return wanted


def observe_num_blocks(model: CausalLM, config: WorkerConfig) -> int:
    """KV blocks that this process has memory for. Ranks of one pod share what a pod without GPUs has."""
    memory = config.kv.memory_bytes
    if memory is None:
        memory = observe_kv_memory(model.device)
        if model.device.type == "cpu":
            memory //= config.group.ranks_per_node
    return plan_num_blocks(memory, model.kv_cache_spec(config.kv.block_size).bytes_per_block)


def observe_kv_memory(device: torch.device) -> int:
    """Bytes that the block space may take on this device, measured now (weights are loaded)."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_FRACTION)
    return min(int(observe_available_memory() * _CPU_FRACTION), _CPU_LIMIT)


def observe_available_memory(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that this process may still take: what the machine has free, or less under a cgroup (v2) limit."""
    available = _GIB
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _read(cgroup / "memory.max").strip()
    if limit.isdigit():
        # File cache counts as current use but gives way.
        reclaimable = 0
        for line in _read(cgroup / "memory.stat").splitlines():
            if line.startswith("inactive_file "):
                reclaimable = int(line.split()[1])
        current = int(_read(cgroup / "memory.current").strip() or 0)
        available = min(available, max(0, int(limit) - current + reclaimable))
    return available


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
