"""DeepSeek-V3 checkpoints with modules for multi-token prediction and random weights, and an independent reference in
plain torch float64 behind transformers' model, written from the report (arXiv:2412.19437, sections 2.1 and 2.2)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests.tandem_worker.families import VOCAB_SIZE, save_family
from tests.tandem_worker.model.draft.heads import Draw

HIDDEN, LAYERS = 48, 3
_NOISE = 0.08
NAME = f"model.layers.{LAYERS}."
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """How a model differs from the common one, and what its module brings."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of the model's configuration."""
    repeats: bool = True
    """The checkpoint holds embedding and output matrix a second time, as DeepSeek's does."""
    own_vocabulary: bool = False
    """They are others than the model's."""
    num_modules: int = 1
    change: Callable[[Tensors], Any] = lambda tensors: None
    """Of what is written."""


def save_model(folder: Path, spec: ModuleSpec, *, counts: bool = False) -> Path:
    """A model with `spec`'s modules. `counts`: its answers are such that the first one is right at times."""
    save_family("deepseek-v3", folder, num_nextn_predict_layers=spec.num_modules, **spec.settings)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for module in range(spec.num_modules):
        tensors |= _draw_module(tensors, spec, f"model.layers.{LAYERS + module}.", seed=5 + module)
    if counts:
        _count(tensors)
    spec.change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _draw_module(tensors: Tensors, spec: ModuleSpec, name: str, seed: int) -> Tensors:
    """Tensors like those of the last layer, and what a module has besides."""
    generator = torch.Generator().manual_seed(seed)

    def draw(like: torch.Tensor, scale: float = 0.25) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator) * scale

    def near_one() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(HIDDEN, generator=generator)

    last = f"model.layers.{LAYERS - 1}."
    made = {name + key.removeprefix(last): draw(value) for key, value in tensors.items() if key.startswith(last)}
    made |= {key: 1 + value for key, value in made.items() if "norm" in key}
    made |= {f"{name}{norm}.weight": near_one() for norm in ("enorm", "hnorm", "shared_head.norm")}
    made[f"{name}eh_proj.weight"] = draw(torch.empty(HIDDEN, 2 * HIDDEN))
    if spec.repeats:
        shared = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        for key, model in shared.items():
            given = tensors[f"{model}.weight"]
            made[f"{name}{key}.weight"] = draw(given) if spec.own_vocabulary else given.clone()
    return made


def _count(tensors: Tensors) -> None:
    """Make of a random model one that says the number after the last one more often than not, and of its module one
    that knows that."""
    for key, value in list(tensors.items()):
        if "o_proj" in key or "down_proj" in key:
            tensors[key] = (0.1 if key.startswith(NAME) else _NOISE) * value
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0)
    tensors[f"{NAME}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{NAME}eh_proj.weight"] = torch.cat((torch.eye(HIDDEN), 0.3 * torch.eye(HIDDEN)), 1)
    for norm in ("enorm", "hnorm"):
        tensors[f"{NAME}{norm}.weight"] = torch.ones(HIDDEN)


class ModuleReference:
    """What a module guesses, computed anew for every text: no cache, no blocks, no latents that are absorbed."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        stored = load_file(folder / "model.safetensors")
        self.tensors = {key.removeprefix(NAME): value.double() for key, value in stored.items() if key.startswith(NAME)}
        self.config = json.loads((folder / "config.json").read_text())
        self.embedding = self.tensors.get("embed_tokens.weight", stored["model.embed_tokens.weight"].double())
        output = stored["lm_head.weight" if "lm_head.weight" in stored else "model.embed_tokens.weight"].double()
        self.output = self.tensors.get("shared_head.head.weight", output)

    @torch.inference_mode()
    def guess(self, text: list[int], depth: int, draw: Draw | None = None) -> tuple[list[int], list[torch.Tensor]]:
        """Tokens behind `text`, whose last token the model has not seen yet, and the logits or scores of each."""
        states = list(self.model.model(torch.tensor([text[:-1]])).last_hidden_state[0].double())
        tokens, guesses, rows = list(text[1:]), list[int](), list[torch.Tensor]()
        for _ in range(depth):
            state = self._last(torch.stack(states), torch.tensor(tokens))
            logits = self.output @ state
            if draw is not None:
                scores = [draw.score(float(x), i, len(text) + len(guesses)) for i, x in enumerate(logits)]
                logits = torch.tensor(scores)
            guesses.append(int(logits.argmax()))
            rows.append(logits)
            states.append(state)
            tokens.append(guesses[-1])
        return guesses, rows

    def _last(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What the output matrix is given of the last place; row i is (state i, token i + 1), at position i."""
        joined = torch.cat((self._norm(self.embedding[tokens], "enorm"), self._norm(states, "hnorm")), -1)
        hidden = joined @ self.tensors["eh_proj.weight"].T
        hidden = hidden + self._attend(self._norm(hidden, "input_layernorm"))
        last = hidden[-1]
        last = last + self._mlp(self._norm(last, "post_attention_layernorm"))
        return self._norm(last, "shared_head.norm")

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        config, heads = self.config, self.config["num_attention_heads"]
        nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
        if config["q_lora_rank"]:
            queries = self._linear(self._norm(self._linear(x, "q_a_proj"), "self_attn.q_a_layernorm"), "q_b_proj")
        else:
            queries = self._linear(x, "q_proj")
        queries = queries.view(len(x), heads, nope + rope)
        down = self._linear(x, "kv_a_proj_with_mqa")
        up = self._linear(self._norm(down[:, :rank], "self_attn.kv_a_layernorm"), "kv_b_proj").view(len(x), heads, -1)
        cos, sin = (part[0, :, : rope // 2] for part in self._angles(len(x)))
        turned = self._turn(queries[..., nope:], cos[:, None], sin[:, None])
        shared = self._turn(down[:, None, rank:], cos[:, None], sin[:, None]).expand(-1, heads, -1)
        keys = torch.cat((up[..., :nope], shared), -1)
        queries = torch.cat((queries[..., :nope], turned), -1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self._scale(nope + rope)
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        return self._linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), up[..., nope:]).flatten(1), "o_proj")

    def _angles(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of transformers, which the model's own layers have."""
        return self.model.model.rotary_emb(torch.empty(0, dtype=torch.float64), torch.arange(length)[None])

    def _turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self.config.get("rope_interleave", True):
            pairs = x.unflatten(-1, (-1, 2))
            first, second = pairs[..., 0], pairs[..., 1]
            return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _scale(self, width: int) -> float:
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        stretch = 1.0
        if rope.get("rope_type") == "yarn":
            stretch = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        return width**-0.5 * stretch**2

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Of one place, `[hidden]`: dense, or the experts whose affinity with it is the greatest."""
        config = self.config
        if "mlp.gate.weight" not in self.tensors:
            return self._gated(x, "mlp.")
        affinities = (self.tensors["mlp.gate.weight"] @ x).sigmoid()
        biased = affinities + self.tensors["mlp.gate.e_score_correction_bias"]
        groups = biased.view(config["n_group"], -1)
        best = groups.topk(2).values.sum(-1).topk(config["topk_group"]).indices
        allowed = torch.full_like(groups, -torch.inf)
        allowed[best] = groups[best]
        chosen = allowed.flatten().topk(config["num_experts_per_tok"]).indices
        weights = affinities[chosen]
        if config["norm_topk_prob"]:
            weights = weights / weights.sum()
        out = self._gated(x, "mlp.shared_experts.")
        for expert, weight in zip(chosen.tolist(), weights * config["routed_scaling_factor"], strict=True):
            out = out + weight * self._gated(x, f"mlp.experts.{expert}.")
        return out

    def _gated(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (self.tensors[f"{name}{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        return down @ (functional.silu(gate @ x) * (up @ x))

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.tensors[f"self_attn.{name}.weight"].T
        bias = self.tensors.get(f"self_attn.{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = 1e-6 if "a_layernorm" in name else self.config["rms_norm_eps"]
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * self.tensors[f"{name}.weight"]


SPECS = {
    "experts": ModuleSpec(),
    "dense": ModuleSpec(settings={"first_k_dense_replace": 9}),
    "no query rank": ModuleSpec(settings={"q_lora_rank": None}),
    "biases": ModuleSpec(settings={"attention_bias": True}),
    "rotation of halves": ModuleSpec(settings={"rope_interleave": False}),
    "two shared experts": ModuleSpec(settings={"n_shared_experts": 2}),
    "plain rotation": ModuleSpec(settings={"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "nothing twice": ModuleSpec(repeats=False),
    "a vocabulary of its own": ModuleSpec(own_vocabulary=True),
    "a tied output matrix": ModuleSpec(repeats=False, settings={"tie_word_embeddings": True}),
    "two modules": ModuleSpec(num_modules=2),
}
VOCAB = VOCAB_SIZE
