"""An EAGLE-3 head that learns, in plain torch, and the files in which it is published.

It is unrolled as it guesses (arXiv:2503.01840): the entries of the second depth have the outputs of the first for their
states, see the true entries before those, and so on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Figures of the head's layer, in the words of its `config.json`."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Lesson:
    """A text of the model's own, and what the model made of each of its L tokens."""

    tokens: torch.Tensor  # [L] int64
    features: torch.Tensor  # [L, 3 * hidden]
    likeliest: torch.Tensor  # [L, K] int64, tokens after each place
    shares: torch.Tensor  # [L, K], their probabilities
    first: int = 0
    """Of the tokens that count: a head is asked within answers."""


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x.float(), weight.shape, weight, eps)


class LearningHead(nn.Module):
    def __init__(self, shape: HeadShape, vocabulary: torch.Tensor, embedding: torch.Tensor) -> None:
        """`vocabulary` `[draft_vocab_size]`, ascending: tokens that it guesses. `embedding`: the model's."""
        super().__init__()
        self.shape = shape
        self.vocabulary = vocabulary
        self._embedding = embedding
        hidden, wide = shape.hidden_size, shape.intermediate_size
        heads, kv_heads = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        sizes = {
            "fc": (hidden, 3 * hidden), "midlayer.self_attn.q_proj": (heads, 2 * hidden),
            "midlayer.self_attn.k_proj": (kv_heads, 2 * hidden), "midlayer.self_attn.v_proj": (kv_heads, 2 * hidden),
            "midlayer.self_attn.o_proj": (hidden, heads), "midlayer.mlp.gate_proj": (wide, hidden),
            "midlayer.mlp.up_proj": (wide, hidden), "midlayer.mlp.down_proj": (hidden, wide),
            "lm_head": (shape.draft_vocab_size, hidden),
        }  # fmt: skip
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(torch.randn(size) * size[1] ** -0.5) for name, size in sizes.items()}
        )
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self.weights[f"midlayer/{name}"] = nn.Parameter(torch.ones(hidden))
        self.weights["norm"] = nn.Parameter(torch.ones(hidden))

    def begin_as(self, layer: dict[str, torch.Tensor], norm: torch.Tensor, output: torch.Tensor) -> None:
        """Begin with weights of the model: its last `layer` by their names there, its last norm and output matrix. The
        state is the last of the features, which the layer reads as the model's own does."""
        hidden = self.shape.hidden_size
        with torch.no_grad():
            for name, weight in layer.items():
                mine = self.weights[f"midlayer/{name.removesuffix('.weight').replace('.', '/')}"]
                if mine.shape == weight.shape:
                    mine.copy_(weight)
                else:  # queries, keys and values: the state's half
                    mine[:, :hidden] *= 0.3
                    mine[:, hidden:] = weight
            self.weights["midlayer/hidden_norm"].copy_(layer["input_layernorm.weight"])
            self.weights["midlayer/input_layernorm"].fill_(1.0)
            self.weights["norm"].copy_(norm)
            self.weights["lm_head"].copy_(output[self.vocabulary])
            self.weights["fc"].mul_(0.05)
            self.weights["fc"][:, 2 * hidden :] += torch.eye(hidden)

    def unroll(self, lesson: Lesson, depths: int) -> tuple[torch.Tensor, list[float]]:
        """Mean cross-entropy against the model over all depths, and the share of guesses at each depth that are the
        model's likeliest token where those before them are text."""
        losses: list[torch.Tensor] = []
        right: list[float] = []
        for depth, every in enumerate(self.guess(lesson, depths)):
            begin = max(1 + depth, lesson.first)  # row r is about what follows the token r + 1 + depth
            wanted, logits = slice(begin, None), every[begin - 1 - depth :]
            losses.append(self._loss(logits, lesson.likeliest[wanted], lesson.shares[wanted]))
            guessed = self.vocabulary[logits.argmax(-1)]
            right.append(float((guessed == lesson.likeliest[wanted, 0]).float().mean()))
        return torch.stack(losses).mean(), right

    def guess(self, lesson: Lesson, depths: int) -> Iterator[torch.Tensor]:
        """Logits `[L - 1 - depth, draft_vocab_size]` of each depth: row r is about the token behind `tokens[r + 1 +
        depth]`, by a chain that began behind `tokens[r + 1]` and went on as the text does."""
        states = lesson.features[:-1].float() @ self._weight("fc").T
        first_keys = first_values = torch.empty(0)
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for depth in range(depths):
            count = len(lesson.tokens) - 1 - depth
            entries = self._enter(lesson.tokens[1 + depth :], states[:count])
            positions = torch.arange(count) + depth
            queries = self._rotate(self._project("q", entries), positions)
            keys, values = self._rotate(self._project("k", entries), positions), self._project("v", entries)
            if depth:
                later = [(k[:count], v[:count]) for k, v in [*later, (keys, values)]]
            else:
                first_keys, first_values = keys, values
            attended = self._attend(queries, first_keys[:count], first_values[:count], later)
            states, logits = self._finish(attended, states[:count])
            yield logits

    def _loss(self, logits: torch.Tensor, likeliest: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        places = torch.searchsorted(self.vocabulary, likeliest).clamp(max=len(self.vocabulary) - 1)
        known = self.vocabulary[places] == likeliest
        taken = logits.log_softmax(-1).gather(1, places)
        return -(taken * shares * known).sum(-1).mean()

    def _enter(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        eps = self.shape.rms_norm_eps
        embedded = _norm(self._embedding[tokens], self._weight("midlayer.input_layernorm"), eps)
        return torch.cat((embedded, _norm(states, self._weight("midlayer.hidden_norm"), eps)), -1)

    def _project(self, kind: str, entries: torch.Tensor) -> torch.Tensor:
        """`[T, heads, head_dim]`."""
        made = entries @ self._weight(f"midlayer.self_attn.{kind}_proj").T
        return made.unflatten(-1, (-1, self.shape.head_dim))

    def _attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        later: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Row r of depth d, at position r + d, sees the true entries up to r, and of each depth up to its own the one
        in its row: those are one chain."""
        group = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        count, scale = len(queries), self.shape.head_dim**-0.5
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        own = [
            torch.einsum("qhd,qhd->hq", queries, each.repeat_interleave(group, 1))[..., None] * scale
            for each, _ in later
        ]
        shares = torch.cat([scores, *own], -1).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares[..., :count], values)
        for index, (_, each) in enumerate(later):
            attended = attended + shares[..., count + index].T[..., None] * each.repeat_interleave(group, 1)
        return attended.flatten(1)

    def _finish(self, attended: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        eps = self.shape.rms_norm_eps
        hidden = states + attended @ self._weight("midlayer.self_attn.o_proj").T
        x = _norm(hidden, self._weight("midlayer.post_attention_layernorm"), eps)
        gate, up = (x @ self._weight(f"midlayer.mlp.{name}_proj").T for name in ("gate", "up"))
        hidden = hidden + (functional.silu(gate) * up) @ self._weight("midlayer.mlp.down_proj").T
        return hidden, _norm(hidden, self._weight("norm"), eps) @ self._weight("lm_head").T

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.shape.head_dim // 2
        frequencies = self.shape.rope_theta ** -(torch.arange(half) / half)
        angles = torch.outer(positions.float(), frequencies)[:, None]
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _weight(self, name: str) -> torch.Tensor:
        return self.weights[name.replace(".", "/")]

    def publish(self, folder: Path) -> None:
        """`config.json` and `model.safetensors`, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", **asdict(self.shape),
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        tensors = {
            f"{name.replace('/', '.')}.weight": weight.detach().bfloat16().contiguous()
            for name, weight in self.weights.items()
        }
        known = torch.zeros(self.shape.vocab_size, dtype=torch.bool)
        known[self.vocabulary] = True
        tensors |= {"d2t": self.vocabulary - torch.arange(len(self.vocabulary)), "t2d": known}
        save_file(tensors, folder / "model.safetensors")
