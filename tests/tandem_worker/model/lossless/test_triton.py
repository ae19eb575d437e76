"""The Triton backend keeps matrices in 12 bits and answers as with plain ones.

Its twins run here, in bfloat16, and in Triton's interpreter the kernels themselves, in float32 (its bfloat16 products
are wrong), in processes of their own.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tandem_worker.host.errors import StartupError
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.load import load_model
from tandem_worker.model.lossless.packing import pack
from tandem_worker.model.weighing import count_matrices, count_weight_bytes
from tandem_worker.parallel.context import ParallelContext

from tests.tandem_worker.kernels.test_interpreter import QUICK_INTERPRETER
from tests.tandem_worker.model.backends.test_backends import CONFIGS, quantize, steps, three_sequences
from tests.tandem_worker.model.layers.ranks import run_ranks

CPU = torch.device("cpu")
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
DTYPE = torch.float32 if INTERPRETS else torch.bfloat16
WIDER = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128, "intermediate_size_mlp": 128,
    "vocab_size": 301, "v_head_dim": 32, "q_lora_rank": 64,
}  # fmt: skip
"""Widths that the form takes: multiples of 64, halves for two ranks too. The vocabulary does not divide."""
GATE = ("llama", "qwen3_moe")
EXPERTS = ("qwen3_moe", "deepseek", "gpt_oss", "llama4")
SHARES = [
    (family, axis) for family in CONFIGS for axis in ("tp", "pp", "ep") if axis != "ep" or family.startswith(EXPERTS)
]


def marked(family: str, *more: str) -> Any:
    return pytest.param(family, *more, marks=() if family in GATE else pytest.mark.full)


def save(family: str, save_random_model: Any, folder: Path) -> None:
    """A family's checkpoint in bfloat16."""
    config = CONFIGS[family]()
    for name, value in WIDER.items():
        if hasattr(config, name):
            setattr(config, name, value)
    save_random_model(config)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: value.bfloat16() if value.is_floating_point() else value for name, value in tensors.items()}, path)


def load(path: Path, weights: Any, **options: Any) -> CausalLM:
    return load_model(path, device=CPU, dtype=DTYPE, backend=BackendName.TRITON, weights=weights, **options)


def answers(model: CausalLM, paged_sequences: Any) -> Iterator[torch.Tensor]:
    run = three_sequences(model, paged_sequences)
    for new in steps()[: 2 if INTERPRETS else None]:
        yield run.step(new)


def assert_same(actual: Iterator[torch.Tensor], expected: Iterator[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        if INTERPRETS:  # what is escaped is added at the end
            assert (one - other).norm() < 1e-5 * other.norm()
            assert torch.equal(one.argmax(-1), other.argmax(-1))
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("family", [marked(family) for family in CONFIGS])
def test_answers_are_those_of_plain_weights(
    family: str, save_random_model: Any, paged_sequences: Any, tmp_path: Path
) -> None:
    save(family, save_random_model, tmp_path)
    plain, packed = load(tmp_path, "Plain"), load(tmp_path, "Lossless")
    assert count_matrices(plain).keys() == {"plain"}
    kept = count_matrices(packed)["lossless"]
    assert kept.count > 4
    per_weight = 4 if INTERPRETS else 2
    assert count_weight_bytes(packed) < count_weight_bytes(plain) - kept.num_bytes * (per_weight / 1.55 - 1)
    assert_same(answers(packed, paged_sequences), answers(plain, paged_sequences))


@pytest.mark.parametrize(("family", "axis"), [marked(*share) for share in SHARES if share[1] != "pp"])
def test_shares_of_ranks_answer_alike(
    family: str, axis: str, save_random_model: Any, paged_sequences: Any, tmp_path: Path
) -> None:
    save(family, save_random_model, tmp_path)

    def logits(weights: str) -> list[list[torch.Tensor]]:
        def work(collective: Any) -> list[torch.Tensor]:
            options = {f"{axis}_rank": collective.rank, f"{axis}_size": 2, axis: collective}
            model = load(tmp_path, weights, context=ParallelContext(**options))
            assert weights == "Plain" or count_matrices(model)["lossless"].count > 1
            return list(answers(model, paged_sequences))

        return run_ranks(2, work)

    for one, other in zip(logits("Lossless"), logits("Plain"), strict=True):
        assert_same(iter(one), iter(other))


@pytest.mark.parametrize("family", [marked(family) for family in CONFIGS])
def test_each_stage_keeps_its_own_matrices(family: str, save_random_model: Any, tmp_path: Path) -> None:
    """Stages send to one another, which these do not: what they hold is counted."""
    save(family, save_random_model, tmp_path)
    whole = count_matrices(load(tmp_path, "Lossless"))["lossless"]
    stages = [load(tmp_path, "Lossless", context=ParallelContext(pp_rank=rank, pp_size=2)) for rank in range(2)]
    counts = [count_matrices(stage)["lossless"] for stage in stages]
    tied = 1 if family == "llama" else 0  # both ends hold the table
    assert sum(count.count for count in counts) == whole.count + tied
    assert tied or sum(count.num_bytes for count in counts) == whole.num_bytes


@pytest.mark.skipif(INTERPRETS, reason="the same with twins")
def test_quantized_matrices_stay_as_they_are(save_random_model: Any, paged_sequences: Any, tmp_path: Path) -> None:
    save("qwen3_moe", save_random_model, tmp_path)
    quantize(tmp_path, "compressed-tensors")
    plain, packed = load(tmp_path, "Plain"), load(tmp_path, "Lossless")
    forms = {form: kept.count for form, kept in count_matrices(packed).items()}
    assert forms == {"int4": count_matrices(plain)["int4"].count, "lossless": 2}  # the table and the output matrix
    assert_same(answers(packed, paged_sequences), answers(plain, paged_sequences))


@pytest.mark.skipif(INTERPRETS, reason="the same with twins")
def test_packed_checkpoints_are_packed_anew_for_the_device(
    save_random_model: Any, paged_sequences: Any, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    save("llama", save_random_model, tmp_path)
    source.mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).rename(source / name)
    pack(source, tmp_path / "packed", "archive")
    model = load(tmp_path / "packed", "Lossless")
    assert count_matrices(model)["lossless"].count > 4
    assert_same(answers(model, paged_sequences), answers(load(source, "Plain"), paged_sequences))


def test_the_log_says_how_many_matrices_are_in_12_bits(
    save_random_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save("llama", save_random_model, tmp_path)
    with caplog.at_level(logging.INFO):
        load(tmp_path, "Lossless")
    (record,) = [entry for entry in caplog.records if "12 bits" in entry.message]
    told = vars(record)
    assert told["matrices"] == 1 + 4 * 2  # the table is the output matrix too
    assert 12.0 < told["bits_per_weight"] < 12.5
    assert told["why"] == "as engine.weights says"


def test_what_nobody_measured_is_not_chosen(
    save_random_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save("llama", save_random_model, tmp_path)
    with caplog.at_level(logging.INFO):
        load(tmp_path, "Auto")
    (record,) = [entry for entry in caplog.records if "kept plain" in entry.message]
    assert "not been measured" in vars(record)["why"]


@pytest.mark.parametrize(
    ("backend", "dtype", "why"),
    [
        (BackendName.TRITON, torch.float16, "for weights of bfloat16, and the model's are float16"),
        (BackendName.TORCH, torch.bfloat16, "torch's operations are in use"),
    ],
)
def test_where_it_cannot_be_had_it_is_refused_in_words(
    backend: BackendName, dtype: torch.dtype, why: str, save_random_model: Any, tmp_path: Path
) -> None:
    save("llama", save_random_model, tmp_path)
    with pytest.raises(StartupError, match=why) as caught:
        load_model(tmp_path, device=CPU, dtype=dtype, backend=backend, weights="Lossless")
    assert caught.value.reason == "WeightsFormUnsupported"


@pytest.mark.skipif(INTERPRETS, reason="it is what starts the interpreter")
@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "llama"])
def test_the_kernels_answer_alike_in_the_interpreter(family: str) -> None:
    """Llama does in every run: `kernels/test_interpreter.py`."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    test = f"{__file__}::test_answers_are_those_of_plain_weights[{family}]"
    command = [sys.executable, "-m", "pytest", test, "-q", *QUICK_INTERPRETER, "-p", "no:cacheprovider", "-m", ""]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "1 passed" in child.stdout


@pytest.mark.skipif(INTERPRETS, reason="the same with twins")
def test_products_of_many_rows_answer_alike(
    save_random_model: Any, paged_sequences: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices are widened for them, ahead of each other."""
    from tandem_worker.model.backends.triton import layers

    monkeypatch.setattr(layers, "MAX_FEW_ROWS", 0)
    save("qwen3_moe", save_random_model, tmp_path)
    widened: list[int] = []
    take = layers.WidenAhead.take
    monkeypatch.setattr(layers.WidenAhead, "take", lambda self, *given: widened.append(given[0]) or take(self, *given))
    packed = load(tmp_path, "Lossless")
    assert_same(answers(packed, paged_sequences), answers(load(tmp_path, "Plain"), paged_sequences))
    assert len(set(widened)) == 6  # of two layers: qkv and o twice, gate_up and down of the one without experts
