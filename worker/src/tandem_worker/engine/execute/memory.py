"""How large the block space is, and how long a request may be in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tandem_worker.host.errors import StartupError

if TYPE_CHECKING:
    import torch
    from tandem_api.launch import WorkerConfig

    from tandem_worker.model.contract import CausalLM

_GIB = 1024**3
_CUDA_FRACTION = 0.95
"""Share of the VRAM that weights and measured activations leave; the rest is for graphs and the allocator's slack."""
_UNMEASURED_FRACTION = 0.85
"""Share of the VRAM that weights leave, where nobody has measured activations."""
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
    """Blocks of host memory below the device's, block 0 included; 0 when none are wanted."""
    if not memory_bytes:
        return 0
    if memory_bytes < 2 * bytes_per_block:
        raise StartupError(
            "HostKVTooSmall",
            f"kv.hostMemory is {memory_bytes} bytes, but one block takes {bytes_per_block} and two are the least; "
            "raise it, or leave it out",
        )
    if memory_bytes > available_bytes:
        raise StartupError(
            "HostKVTooLarge",
            f"kv.hostMemory is {memory_bytes} bytes, but {available_bytes} bytes of host memory are free; lower it, or "
            "raise the memory limit of the pod",
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


def observe_num_blocks(model: CausalLM, config: WorkerConfig, arena_bytes: int | None = None) -> int:
    """KV blocks that this process has memory for. Ranks of one pod share what a pod without GPUs has."""
    memory = config.kv.memory_bytes
    if memory is None:
        memory = observe_kv_memory(model.device, arena_bytes)
        if model.device.type == "cpu":
            memory //= config.group.ranks_per_node
    return plan_num_blocks(memory, model.kv_cache_spec(config.kv.block_size).bytes_per_block)


def plan_gpu_kv_memory(free_bytes: int, arena_bytes: int | None) -> int:
    """Bytes for the block space out of what is free beside the weights. `arena_bytes` None: not measured."""
    if arena_bytes is None:
        return int(free_bytes * _UNMEASURED_FRACTION)
    return int(max(0, free_bytes - arena_bytes) * _CUDA_FRACTION)


def observe_num_host_blocks(model: CausalLM, config: WorkerConfig) -> int:
    """Blocks of host memory that this process is to have, block 0 included. The ranks of a pod share what is free."""
    bytes_per_block = model.kv_cache_spec(config.kv.block_size).bytes_per_block
    free = observe_available_memory(beside_gpu=True) // config.group.ranks_per_node
    return plan_num_host_blocks(config.kv.host_memory_bytes, bytes_per_block, free)


def observe_kv_memory(device: torch.device, arena_bytes: int | None = None) -> int:
    """Bytes that the block space may take on this device, measured now (weights are loaded, activations are not).

    `arena_bytes` is what activations take at their most (`arena.measure_arena`).
    """
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return plan_gpu_kv_memory(free, arena_bytes)
    return min(int(observe_available_memory() * _CPU_FRACTION), _CPU_LIMIT)


def observe_available_memory(
    cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo"), *, beside_gpu: bool = False
) -> int:
    """Bytes that this process may still take: what the machine has free, or less under a cgroup (v2) limit.

    File cache counts as current use but gives way. What was read twice does so only `beside_gpu`: those are the
    weights, of which a copy is on the device there, and which a CPU may compute with as they are mapped.
    """
    available = _GIB
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _read(cgroup / "memory.max").strip()
    if limit.isdigit():
        caches = {"inactive_file", "active_file"} if beside_gpu else {"inactive_file"}
        fields = (line.split() for line in _read(cgroup / "memory.stat").splitlines())
        reclaimable = sum(int(value) for name, value in fields if name in caches)
        current = int(_read(cgroup / "memory.current").strip() or 0)
        available = min(available, max(0, int(limit) - current + reclaimable))
    return available


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
