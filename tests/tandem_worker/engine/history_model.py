"""A model without weights whose next token depends on every token of the context, as read from the KV cache.

Writing stores each token and a fingerprint of (token, position); reading goes through the block table. A wrong,
overwritten, uncopied or misplaced block gives other logits than `HistoryOracle`, which has only the token list.
"""

from __future__ import annotations

import torch
from tandem_worker.model.contract import ForwardBatch, KVCache, KVCacheSpec, KVLayerSpec
from tandem_worker.model.pooling import EmbeddingSpec

_A, _B, _C = 0x9E3779B97F4A7C1, 0x2545F4914F6CDD1, 0x5851F42D4C957F3
_MASK, _SIGN = (1 << 64) - 1, 1 << 63


def _wrap(value: int) -> int:
    """Python's integers as two's complement of 64 bits, like torch's."""
    return ((value & _MASK) ^ _SIGN) - _SIGN


def mix_tensor(value: torch.Tensor) -> torch.Tensor:
    value = value * _A
    value = (value ^ (value >> 29)) * _B
    return value ^ (value >> 31)


def mix_int(value: int) -> int:
    value = _wrap(value * _A)
    value = _wrap((value ^ (value >> 29)) * _B)
    return value ^ (value >> 31)


class HistoryModel:
    """Implements `CausalLM`."""

    def __init__(self, vocab_size: int = 64, max_position_embeddings: int = 4096) -> None:
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.embedding: EmbeddingSpec | None = None
        self.is_one_call = False
        self.inexact: str | None = "its rows are exact, but most tests count its steps"
        self.exact_rows = 1
        self.fail_once: Exception | None = None
        self.batch_sizes: list[int] = []
        self.num_tokens = 0

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        layer = KVLayerSpec(block_shape=(block_size,))
        return KVCacheSpec(layers=(layer, layer), dtype=torch.int64, block_size=block_size)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        self._check(batch)
        if self.fail_once is not None:
            error, self.fail_once = self.fail_once, None
            raise error
        values = (batch.token_ids, mix_tensor(batch.token_ids * _C + batch.positions))
        for index, (layer, value) in enumerate(zip(kv_cache.layers, values, strict=True)):
            if batch.before_layer is not None:
                batch.before_layer(index)
            layer.view(-1)[batch.slot_mapping] = value
            if batch.on_layer is not None:
                batch.on_layer(index)
        sequence_of = batch.find_sequence_ids()[batch.logits_rows]
        tables = batch.block_tables[sequence_of].long()
        tokens, fingerprints = (layer[tables].flatten(1) for layer in kv_cache.layers)
        positions = torch.arange(tokens.shape[1])
        history = mix_tensor(tokens * _C + positions) + 3 * fingerprints
        seen = positions <= batch.positions[batch.logits_rows][:, None]
        digest = torch.where(seen, history, 0).sum(dim=1)
        return logits_of(digest, self.vocab_size)

    def _check(self, batch: ForwardBatch) -> None:
        self.batch_sizes.append(len(batch.query_lens_host))
        self.num_tokens += batch.token_ids.shape[0]
        lengths = torch.tensor(batch.query_lens_host)
        assert torch.equal(batch.query_start.long(), torch.cat([torch.zeros(1), lengths.cumsum(0)]).long())
        assert batch.context_lens.tolist() == list(batch.context_lens_host)
        last = batch.query_start[1:].long() - 1
        assert (batch.logits_rows.diff() > 0).all(), "a model may take as many rows as there are tokens for all of them"
        assert torch.equal(batch.positions[last] + 1, batch.context_lens.long())
        assert int(batch.slot_mapping.min()) >= batch.block_tables.shape[1] > 0 or int(batch.slot_mapping.min()) > 0
        assert batch.slot_mapping.unique().numel() == batch.slot_mapping.numel(), "two tokens write to one slot"


def logits_of(digest: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`[N]` digests to `[N, vocab]` logits in [0, 8)."""
    mixed = mix_tensor(digest[:, None] + torch.arange(vocab_size) * _C)
    return ((mixed >> 20) & 0xFFFFF).float() / (1 << 17)


class HistoryOracle:
    """The same logits from a list of tokens, one at a time."""

    def __init__(self, vocab_size: int = 64) -> None:
        self.vocab_size = vocab_size
        self._digest = 0
        self._length = 0

    def extend(self, token_ids: list[int] | tuple[int, ...]) -> HistoryOracle:
        for token in token_ids:
            self._digest = _wrap(self._digest + 4 * mix_int(token * _C + self._length))
            self._length += 1
        return self

    def logits(self) -> torch.Tensor:
        return logits_of(torch.tensor([self._digest]), self.vocab_size)[0]

    def greedy(self, count: int) -> list[int]:
        """Continue by `count` tokens."""
        tokens: list[int] = []
        for _ in range(count):
            tokens.append(int(self.logits().argmax()))
            self.extend(tokens[-1:])
        return tokens


def greedy_answer(prompt: tuple[int, ...], count: int, vocab_size: int = 64) -> list[int]:
    return HistoryOracle(vocab_size).extend(prompt).greedy(count)
