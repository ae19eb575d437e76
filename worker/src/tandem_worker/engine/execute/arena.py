"""How much memory activations take at their most: what a forward pass over the largest batch allocates on top.

And what recorded decode steps take beside them.

On a GPU the largest batch is run once over scratch blocks and the allocator's high-water mark is read. A CPU would take
seconds for that: there a batch of a few tokens is run, new tensors are counted while they live, and the result is
scaled, as activations grow with the tokens.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem_worker.engine.execute.cuda_graphs import build_static_batch
from tandem_worker.model.contract import CausalLM, ForwardBatch, KVCache, allocate_kv_cache

_FEW_TOKENS = 32


def measure_arena(model: CausalLM, *, max_batch_tokens: int, max_rows: int, block_size: int) -> int:
    """Bytes beyond weights and KV that a step of `max_batch_tokens` with logits of `max_rows` sequences needs.

    The model runs alone: with other ranks, all of them would have to take part.
    """
    if model.device.type == "cuda":
        return _measure_prompt(model, max_batch_tokens, max_rows, block_size)
    tokens = min(_FEW_TOKENS, max_batch_tokens)
    row = model.vocab_size * 4
    return max(0, _measure_prompt(model, tokens, 1, block_size) - row) * -(-max_batch_tokens // tokens) + row * max_rows


def measure_recordings(model: CausalLM, *, max_rows: int, max_model_len: int, block_size: int) -> int:
    """Bytes that recorded decode steps (`cuda_graphs`) keep: their inputs, logits and the widest one's activations.

    They come on top of the arena: what a recording has allocated nothing else may use.
    """
    cache = allocate_kv_cache(model.kv_cache_spec(block_size), 2, model.device)
    batch = build_static_batch(max_rows, -(-max_model_len // block_size), block_size, model.device)
    kept = batch.block_tables.nbytes + max_rows * model.vocab_size * 4
    return kept + _measure_forward(model, batch, cache)


def _measure_prompt(model: CausalLM, tokens: int, rows: int, block_size: int) -> int:
    """Bytes that one prompt of `tokens` tokens takes at its most, with logits of its last `rows`."""
    cache = allocate_kv_cache(model.kv_cache_spec(block_size), -(-tokens // block_size) + 1, model.device)
    return _measure_forward(model, build_prompt_batch(tokens, min(rows, tokens), block_size, model.device), cache)


def _measure_forward(model: CausalLM, batch: ForwardBatch, cache: KVCache) -> int:
    """The most bytes that a forward pass holds beside what there was before it."""
    if model.device.type != "cuda":
        with torch.inference_mode(), AllocationCounter() as counter:
            model.forward(batch, cache)
        return counter.peak
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    with torch.inference_mode():
        model.forward(batch, cache)
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device)
    torch.cuda.empty_cache()
    return max(0, peak - before)


def build_prompt_batch(tokens: int, rows: int, block_size: int, device: torch.device) -> ForwardBatch:
    """A prompt of zeros in blocks 1 and following."""
    positions = torch.arange(tokens, device=device)
    num_blocks = -(-tokens // block_size)
    return ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=positions,
        slot_mapping=positions + block_size,
        block_tables=torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)[None],
        query_start=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
        logits_rows=torch.arange(tokens - rows, tokens, device=device),
        query_lens_host=(tokens,),
        context_lens_host=(tokens,),
    )


class AllocationCounter(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still held; `peak` is their most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held = 0
        self._users: dict[int, list[int]] = {}
        """Users by a storage's address: its bytes, and the tensors over it that are alive."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; the default, True, imports all of torch's compiler: 900 modules, 2 s of a start."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)
        } - self._users.keys()
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _has_storage(leaf) and leaf.untyped_storage().data_ptr() not in inputs:
                self._add(leaf)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        entry = self._users.setdefault(address, [size, 0])
        if entry[1] == 0:
            self._held += size
            self.peak = max(self.peak, self._held)
        entry[1] += 1
        weakref.finalize(tensor, self._drop, address)

    def _drop(self, address: int) -> None:
        entry = self._users[address]
        entry[1] -= 1
        if entry[1] == 0:
            self._held -= entry[0]
            del self._users[address]


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.untyped_storage().nbytes() > 0
