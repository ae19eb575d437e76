"""The baseline: a decode step of a dense Qwen3 in plain torch, as one CUDA graph.

cuBLAS products, `scaled_dot_product_attention` over a contiguous cache of one length, greedy choice on the device. It
serves nobody: every sequence has the same length, and nothing is paged, scheduled or sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional


class TorchStep:
    """`run` decodes one token of every sequence at position `context - 1`."""

    def __init__(self, raw: Mapping[str, Any], rows: int, context: int, device: torch.device) -> None:
        self._raw, self._rows, self._context = raw, rows, context
        hidden, width, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
        self._heads, self._kv_heads, self._dim = raw["num_attention_heads"], raw["num_key_value_heads"], dim

        def matrix(outputs: int, inputs: int) -> torch.Tensor:
            return torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16).mul_(inputs**-0.5)

        self._layers = [
            {
                "qkv": matrix((self._heads + 2 * self._kv_heads) * dim, hidden),
                "o": matrix(hidden, self._heads * dim),
                "gate_up": matrix(2 * width, hidden),
                "down": matrix(hidden, width),
                "keys": torch.randn(rows, self._kv_heads, context, dim, device=device, dtype=torch.bfloat16),
                "values": torch.randn(rows, self._kv_heads, context, dim, device=device, dtype=torch.bfloat16),
            }
            for _ in range(raw["num_hidden_layers"])
        ]
        self._embedding = matrix(raw["vocab_size"], hidden)
        self._head = matrix(raw["vocab_size"], hidden)
        self._norm = torch.ones(hidden, device=device, dtype=torch.bfloat16)
        self._head_norm = torch.ones(dim, device=device, dtype=torch.bfloat16)
        angles = (context - 1) * raw["rope_theta"] ** (-torch.arange(0, dim, 2, device=device) / dim)
        self._cos, self._sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def resize(self, rows: int) -> None:
        """Another batch over the same weights."""
        self._rows = rows
        for layer in self._layers:
            for name in ("keys", "values"):
                old = layer.pop(name)
                shape = (rows, self._kv_heads, self._context, self._dim)
                layer[name] = torch.randn(shape, device=old.device, dtype=old.dtype)
        self.tokens = self.tokens.new_zeros(rows)

    def run(self) -> torch.Tensor:
        hidden = functional.embedding(self.tokens, self._embedding)
        for layer in self._layers:
            normed = self._normalize(hidden, self._norm)
            hidden = hidden + functional.linear(self._attend(normed, layer), layer["o"])
            gate, up = functional.linear(self._normalize(hidden, self._norm), layer["gate_up"]).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer["down"])
        logits = functional.linear(self._normalize(hidden, self._norm), self._head)
        return self.tokens.copy_(logits.argmax(-1))

    def _attend(self, x: torch.Tensor, layer: Mapping[str, torch.Tensor]) -> torch.Tensor:
        heads = functional.linear(x, layer["qkv"]).view(self._rows, -1, self._dim)
        q, k, v = heads.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        q, k = (self._rotate(self._normalize(part, self._head_norm)) for part in (q, k))
        layer["keys"][:, :, -1] = k
        layer["values"][:, :, -1] = v
        out = functional.scaled_dot_product_attention(q[:, :, None], layer["keys"], layer["values"], enable_gqa=True)
        return out.reshape(self._rows, -1)

    @staticmethod
    def _normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * self._cos - second * self._sin, second * self._cos + first * self._sin), dim=-1)
