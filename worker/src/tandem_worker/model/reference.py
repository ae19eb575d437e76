"""Writes `docs/models.md`: which keys and tensors each family knows. `make generate` runs it, a test compares."""

# ruff: noqa: E501 (rows of tables cannot be wrapped)

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem_worker.model import gguf_keys
from tandem_worker.model.checkpoint.schemes import SCHEMES
from tandem_worker.model.families.registry import find_family, supported_architectures
from tandem_worker.model.keys import COMMON_FIXED, COMMON_IGNORES, DECODER_READS, REQUIRED, ConfigKeys
from tandem_worker.model.rope import SCALING_KEYS

_INTRODUCTION = """\
<!-- Generated from worker/src/tandem_worker/model by `make generate`. Do not edit. -->
# Models

Which models are served, and what of their files is read. A key of `config.json`, or a tensor of the checkpoint, that
changes the computation and that nobody reads would give wrong answers without a word. So everything in these files is
read, or known to change nothing, or the model is refused:

| Reason of `ModelReady` | What happened | What to do |
|---|---|---|
| `UnsupportedArchitecture` | no family serves the class that `architectures` names | choose another model |
| `UnsupportedConfig` | a key has a value that the family does not compute with, or is not a key that it knows and is not null; the message names the keys, their values, and the values that are known | choose another checkpoint; where the key is a leftover that changes nothing, serve a copy of the model without it from `pvc://` |
| `ConfigInvalid` | a value is missing, is not what its key needs, or contradicts another | repair `config.json`, or download it again |
| `WeightsUnsupported` | `quantization_config` names a method or a setting by which weights cannot be read | choose a checkpoint that is quantized in another way |
| `UnusedWeights` | the checkpoint holds tensors that the model is not computed with; the message names some | compare `config.json` with the published one (a flag such as `attention_bias` may be missing); else the model is a variant that is not supported |
| `WeightsFormUnsupported` | `engine.weights: Lossless` where no kernel multiplies such weights | choose `Auto` or `Plain`, or a node with an NVIDIA GPU or with a CPU that has AVX-512 VBMI ([kernels](kernels.md#weights-in-12-bits)) |
| `WeightsIncomplete` | a tensor is missing | download the model again |

Nothing turns these refusals off. They come before any weight is read, on every rank alike. To look at a checkpoint
without a cluster, start the worker's own check where its package is installed:

    python -c "import sys, torch, pathlib; from tandem_worker.model.load import load_model;
    load_model(pathlib.Path(sys.argv[1]), device=torch.device('cpu'))" /path/to/model

Absent keys stand for the default of transformers' configuration class. Tests compare these tables with those classes,
and each key's effect with transformers' models (`tests/tandem_worker/model/test_keys*.py`), so that a release of
transformers that adds a key is noticed.

**Limits.** Only what transformers' own classes compute is held against them: what a repository's own code
(`auto_map`) does otherwise is not seen. Activations other than SiLU are refused, ReLU variants of Llama among them.
Quantized activations and key-value scales are left out: weights are read as stored, everything else stays in the model's
type.
"""

_PACKED = """\
## Packed checkpoints

A checkpoint of bfloat16 can be kept a quarter or a third smaller, and gives every bit back:

    python -m tandem_worker.model.lossless pack SOURCE TARGET --form fixed|archive
    python -m tandem_worker.model.lossless unpack SOURCE TARGET
    python -m tandem_worker.model.lossless verify FOLDER [--against ORIGINAL]

| Form | Bits a weight | What for |
|---|---|---|
| `fixed` | 12.0 to 12.1 | loading on CPUs: matrices lie as [their kernels of 12 bits](kernels.md#weights-in-12-bits) read them, fused and shared among ranks without being decoded. For a GPU they are decoded and packed anew |
| `archive` | 10.6 | downloading and keeping: sign and mantissa as they are, exponents by zstd |

The target is a folder of safetensors files under the names of the source, with everything else of it beside and a list,
`tandem_lossless.json`. It is there complete, or not at all: until then `.TARGET.` and eight characters is its name, which is
what a run that was killed leaves behind, to be deleted. The same source gives the same bytes. Packed are tensors of
bfloat16 that get smaller by it: by a fifth for `fixed`, which takes matrices of even width, by a tenth for `archive`. The
others stay as they are. `unpack` gives every file of the source with its SHA-256, which `verify` checks without writing.

The last line of stdout is one JSON object with `form`, `originalBytes`, `packedBytes`, `tensors`, `packedTensors`,
`bitsPerWeight` (of packed tensors) and `seconds`. Exit code 0; 1 where something is damaged, different, or cannot be read
or written; 2 for what cannot be asked for, such as a target that is not empty.

Workers load both forms from `hf://`, `pvc://` and `file://`, with every `engine.weights` and on every device. Every 4 MiB of
a tensor have a checksum that is checked before they are used; headers and small files beside the weights have one too.
What does not agree is `WeightsCorrupt`, with file and tensor. A packed copy has another digest than its source, so workers
of both exchange no KV blocks. Other programs list the tensors and cannot compute with the packed ones: unpack for them.
GGUF files are not packed.

Measured by `make bench-lossless BENCH=--checkpoints` on one core beside much other work, in GB of bfloat16 per second of
CPU: `archive` packs 1.2 and gives back 1.9 to 2.2 with its checksums, `fixed` is checked and copied at 7.8 to 9.1. Of values
as training leaves them `fixed` takes 12.01 bits and `archive` 10.61, of SmolLM2's 12.02 and 10.66.
"""


_PREDICTION = """
Layers behind the model's own, as many as `num_nextn_predict_layers` says, are modules for multi-token prediction. Answers
do not depend on them: the first one may be [a draft head](speculation.md#the-models-own-module), the others are left out.
"""

_PLAIN = ConfigKeys(model_types=(), reads={})


def render() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, _render_common()]
    done: list[tuple[ConfigKeys, str]] = []
    for architecture in supported_architectures():
        family = find_family(architecture)
        keys = family.keys
        inner = replace(keys, wrapper=None)
        same = next((other for known, other in done if known == inner), None)
        text = _render_family(inner) if same is None else f"As {same}.\n"
        if same is None:
            done.append((inner, architecture))
            if family.load_prediction_layer is not None:
                text += _PREDICTION
        if keys.wrapper is not None:
            text += f"\nAll this is of `text_config`. Around it:\n\n{_render_family(keys.wrapper)}"
        parts.append(f"## {architecture}\n\n{text}")
    return "\n".join([*parts, _render_gguf(), _render_schemes(), _PACKED])


def _render_common() -> str:
    rows = [(_codes(keys), reason) for reason, keys in _by_reason(COMMON_IGNORES).items()]
    scalings = [(f"`{kind}`", _codes(keys) or "nothing") for kind, keys in SCALING_KEYS.items()]
    return "\n".join([
        "## Every family\n",
        "Reads " + ", ".join(_read(key, value) for key, value in DECODER_READS.items()) + ".\n",
        "Computes with one value only: " + "; ".join(_fixed(item) for item in COMMON_FIXED.items()) + ".\n",
        "Rotary settings are read from `rope_parameters`, or from `rope_theta` and `rope_scaling`, whose contents are:\n",
        _table(("Type", "Reads"), scalings),
        "\nIgnored, whatever the value:\n",
        _table(("Keys", "Why"), rows),
        "",
    ])  # fmt: skip


def _render_family(keys: ConfigKeys) -> str:
    own = {key: value for key, value in keys.reads.items() if DECODER_READS.get(key, keys) != value}
    lines = [
        f"`model_type`: {_codes(keys.model_types)}.",
        f"Reads besides: {', '.join(_read(*item) for item in own.items())}.",
    ]
    if keys.rope_parameters or keys.rope_theta != _PLAIN.rope_theta:
        default = f"base {keys.rope_theta:g}"
        if keys.rope_parameters:
            default += ", " + ", ".join(f"`{key}` {_value(value)}" for key, value in keys.rope_parameters.items())
        lines.append(f"Rotary settings where absent: {default}.")
    if keys.rope_kinds != _PLAIN.rope_kinds:
        lines.append(f"Types of rotary settings: {_codes(keys.rope_kinds)}.")
    if keys.fixed or keys.derived:
        agree = [f"`{key}` (must agree with other keys)" for key in keys.derived]
        lines.append(f"Computes with one value only: {'; '.join([*map(_fixed, keys.fixed.items()), *agree])}.")
    if keys.aliases:
        names = ", ".join(f"`{alias}` for `{key}`" for alias, key in keys.aliases.items())
        lines.append(f"Other names: {names}.")
    if keys.ignores:
        lines.append(f"Ignored: {_reasons(keys.ignores)}.")
    return "\n\n".join(lines) + "\n"


def _render_gguf() -> str:
    served = ", ".join(f"`{name}` as {architecture}" for name, architecture in gguf_keys.GGUF_FAMILIES.items())
    return "\n".join([
        "## GGUF files\n",
        f"Served are {served}. Of the keys that begin with the architecture's name these are read: "
        f"{_codes([*gguf_keys.READS, *gguf_keys.ROPE_READS])}.\n",
        f"Computed with one value only: {'; '.join(map(_fixed, gguf_keys.FIXED.items()))}; and, in agreement with the "
        f"size of a head, {_codes(gguf_keys.DERIVED)}.\n",
        f"Ignored: {_reasons(gguf_keys.IGNORES)}.\n",
    ])  # fmt: skip


def _render_schemes() -> str:
    rows = [
        (f"`{method}`", _codes(sorted(scheme.reads)), "; ".join(map(_fixed, scheme.fixed.items())),
         _codes(sorted(scheme.ignores)))
        for method, scheme in SCHEMES.items()
    ]  # fmt: skip
    heads = ("`quant_method`", "Read", "One value only", "Ignored")
    return f"## Quantized checkpoints\n\nKeys of `quantization_config`:\n\n{_table(heads, rows)}\n"


def _by_reason(ignores: Mapping[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for key, reason in ignores.items():
        reasons.setdefault(reason, []).append(key)
    return reasons


def _reasons(ignores: Mapping[str, str]) -> str:
    return "; ".join(f"{_codes(keys)} ({reason})" for reason, keys in _by_reason(ignores).items())


def _read(key: str, default: Any) -> str:
    if default is REQUIRED:
        return f"`{key}` (required)"
    return f"`{key}`" if default is None else f"`{key}` ({_value(default)})"


def _fixed(item: tuple[str, tuple[Any, ...]]) -> str:
    key, values = item
    return f"`{key}` {' or '.join(_value(value) for value in values if value is not None) or 'null'}"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _codes(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace(" --- ", "---") for line in lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
