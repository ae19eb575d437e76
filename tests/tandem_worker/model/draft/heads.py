"""Published EAGLE-3 heads with random weights, in every layout, and an independent reference in plain torch float32."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tandem_worker.host.philox import philox4x32
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

VOCAB, DRAFT_VOCAB = 61, 40
TARGET: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip


def save_target(folder: Path, seed: int = 3, **changes: Any) -> Path:
    """A Llama model with random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**(TARGET | changes)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Which layout a head has, and which switches."""

    prefix: str = "midlayer."
    nested: bool = False
    own_embedding: bool = False
    hidden_size: int = 64
    vocab_size: int = VOCAB
    draft_vocab_size: int = DRAFT_VOCAB
    norm_before_residual: bool | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    layer_ids: tuple[int, ...] | None = None
    ids_in_eagle_config: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    """More of the layer's configuration."""

    @property
    def adds_to_norm(self) -> bool:
        return self.nested if self.norm_before_residual is None else self.norm_before_residual

    @property
    def feature_layers(self) -> tuple[int, ...]:
        layers = TARGET["num_hidden_layers"]
        return self.layer_ids or (2, layers // 2, layers - 3)


def head_config(spec: HeadSpec) -> dict[str, Any]:
    layer = {
        "vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size, "intermediate_size": 112,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "model_type": "llama", "hidden_act": "silu",
        "attention_bias": spec.attention_bias, **spec.settings,
    }  # fmt: skip
    switches: dict[str, Any] = {"draft_vocab_size": spec.draft_vocab_size}
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if getattr(spec, name):
            switches[name] = True
    if spec.norm_before_residual is not None:
        switches["norm_before_residual"] = spec.norm_before_residual
    if spec.hidden_size != TARGET["hidden_size"]:
        switches["target_hidden_size"] = TARGET["hidden_size"]
    if spec.layer_ids is not None:
        ids = {"eagle_aux_hidden_state_layer_ids": list(spec.layer_ids)}
        switches |= {"eagle_config": ids | {"use_aux_hidden_state": True}} if spec.ids_in_eagle_config else ids
    if spec.nested:
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
            "transformer_layer_config": layer,
            "torch_dtype": "bfloat16",
            **switches,
        }
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **switches}


def draw_tensors(spec: HeadSpec, seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.25

    def near_one(width: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(width, generator=generator)

    hidden, target, count, own = spec.hidden_size, TARGET["hidden_size"], len(spec.feature_layers), spec.prefix
    wide = spec.settings.get("intermediate_size", 112)
    tensors = {
        f"{own}input_layernorm.weight": near_one(hidden),
        f"{own}hidden_norm.weight": near_one(hidden),
        f"{own}self_attn.q_proj.weight": draw(64, 2 * hidden),
        f"{own}self_attn.k_proj.weight": draw(32, 2 * hidden),
        f"{own}self_attn.v_proj.weight": draw(32, 2 * hidden),
        f"{own}self_attn.o_proj.weight": draw(hidden, 64),
        f"{own}post_attention_layernorm.weight": near_one(hidden),
        f"{own}mlp.gate_proj.weight": draw(wide, hidden),
        f"{own}mlp.up_proj.weight": draw(wide, hidden),
        f"{own}mlp.down_proj.weight": draw(hidden, wide),
        "fc.weight": draw(hidden, count * target),
        "norm.weight": near_one(hidden),
        "lm_head.weight": draw(spec.draft_vocab_size, hidden),
    }
    if spec.attention_bias:
        widths = {"q": 64, "k": 32, "v": 32, "o": hidden}
        tensors |= {f"{own}self_attn.{kind}_proj.bias": draw(width) for kind, width in widths.items()}
    if spec.own_embedding:
        tensors["embed_tokens.weight"] = draw(spec.vocab_size, hidden)
    if spec.norm_before_fc:
        tensors["input_norm.weight"] = near_one(count * target)
    if spec.fc_norm:
        tensors |= {f"fc_norm.{index}.weight": near_one(target) for index in range(count)}
    if spec.draft_vocab_size != spec.vocab_size:
        chosen = torch.randperm(spec.vocab_size, generator=generator)[: spec.draft_vocab_size].sort().values
        tensors["d2t"] = chosen - torch.arange(spec.draft_vocab_size)
        tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def save_head(folder: Path, spec: HeadSpec, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """A published head in `folder`; `config` changes its configuration, None takes a key away."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {key: value for key, value in (head_config(spec) | config).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))
    save_file(draw_tensors(spec) if tensors is None else tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Draw:
    """How the tokens of a text are drawn, without limits."""

    seed: int
    choice: int
    temperature: float

    def score(self, logit: float, token: int, position: int) -> float:
        """Of a token's logit: the one with the highest score is drawn."""
        key = self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF
        word = philox4x32((position, self.choice, token // 4, 0), key)[token % 4]
        return logit / self.temperature - math.log(-math.log1p(-(word + 0.5) / 2**32))


class Reference:
    """What a head guesses, computed anew for every text: no cache, no blocks, one text at a time."""

    def __init__(self, target: Path, spec: HeadSpec, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.spec = spec
        self.tensors = draw_tensors(spec) if tensors is None else tensors

    @torch.inference_mode()
    def guess(self, text: list[int], depth: int, draw: Draw | None = None) -> tuple[list[int], list[torch.Tensor]]:
        """Tokens behind `text`, whose last token the model has not seen yet, and the logits or scores of each."""
        states = list(self._fuse(text[:-1]))
        tokens = list(text[1:])
        guesses: list[int] = []
        rows: list[torch.Tensor] = []
        for _ in range(depth):
            logits, state = self._last(torch.stack(states), torch.tensor(tokens))
            if draw is not None:
                scores = [draw.score(float(x), self._token(i), len(text) + len(guesses)) for i, x in enumerate(logits)]
                logits = torch.tensor(scores)
            guesses.append(self._token(int(logits.argmax())))
            rows.append(logits)
            states.append(state)
            tokens.append(guesses[-1])
        return guesses, rows

    def _token(self, place: int) -> int:
        return place + int(self.tensors["d2t"][place]) if "d2t" in self.tensors else place

    def _fuse(self, seen: list[int]) -> torch.Tensor:
        streams = self.model(torch.tensor([seen]), output_hidden_states=True).hidden_states
        parts = [streams[layer][0] for layer in self.spec.feature_layers]
        if self.spec.fc_norm:
            parts = [self._norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)]
        features = torch.cat(parts, -1)
        if self.spec.norm_before_fc:
            features = self._norm(features, "input_norm")
        return features @ self.tensors["fc.weight"].T

    def _last(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and next state of the last entry; row i is (state i, token i + 1), at position i."""
        spec, own = self.spec, self.spec.prefix
        table = self.tensors.get("embed_tokens.weight", self.model.get_parameter("model.embed_tokens.weight"))
        normed = self._norm(states, f"{own}hidden_norm")
        x = torch.cat((self._norm(table[tokens], f"{own}input_layernorm"), normed), -1)
        residual = normed if spec.adds_to_norm else states
        q, k, v = (self._linear(x, f"{own}self_attn.{kind}_proj").view(len(x), -1, 16) for kind in "qkv")
        positions = torch.arange(len(x), dtype=torch.float32)
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / 4.0
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        hidden = residual + self._linear(attended, f"{own}self_attn.o_proj")
        x = self._norm(hidden, f"{own}post_attention_layernorm")
        gated = functional.silu(self._linear(x, f"{own}mlp.gate_proj")) * self._linear(x, f"{own}mlp.up_proj")
        hidden = (hidden + self._linear(gated, f"{own}mlp.down_proj"))[-1]
        out = self._norm(hidden, "norm")
        return self.tensors["lm_head.weight"] @ out, out if spec.norm_output else hidden

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.tensors[f"{name}.weight"]

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        theta = self.spec.settings.get("rope_theta", 10000.0)
        angles = torch.outer(positions, theta ** -(torch.arange(0, 16, 2).float() / 16))[:, None]
        first, second = x[..., :8], x[..., 8:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
