"""Models come of both forms as of their source: into every backend, plain or packed in memory, whole or in shares."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tandem_worker.host.errors import StartupError
from tandem_worker.model import load as loading
from tandem_worker.model.backends import native
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.backends.form import FormChoice
from tandem_worker.model.backends.native.backend import NATIVE
from tandem_worker.model.checkpoint import split, split_kernels
from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.checkpoint.files import find_safetensors
from tandem_worker.model.checkpoint.lossless import LosslessSource
from tandem_worker.model.checkpoint.packed_folder import FORMS, Form
from tandem_worker.model.checkpoint.safetensors import SafetensorsSource
from tandem_worker.model.checkpoint.split import SplitMatrix
from tandem_worker.model.checkpoint.stored import Slice, StoredPart
from tandem_worker.model.contract import CausalLM
from tandem_worker.model.load import load_model
from tandem_worker.model.lossless import packing
from tandem_worker.model.lossless.packing import pack
from tandem_worker.model.lossless.unpacking import verify
from tandem_worker.model.weighing import count_matrices
from tandem_worker.parallel.context import ParallelContext

from tests.tandem_worker.model.backends.test_backends import CASES, save_family, steps, three_sequences
from tests.tandem_worker.model.layers.ranks import run_ranks
from tests.tandem_worker.model.lossless.checkpoints import bits, small, trained, write

CPU = torch.device("cpu")
GATE = frozenset({"llama", "gpt_oss", "qwen3_moe_int4"})
"""Tied tables and shares, stacked experts, a quantized checkpoint; the full run has the others."""
EXPERTS = ("qwen3_moe", "deepseek", "gpt_oss", "llama4")
needs_kernels = pytest.mark.skipif(
    native.find_lossless_obstacle() is not None, reason=f"no CPU kernels: {native.find_lossless_obstacle()}"
)


SHARES = [
    (family, axis) for family in CASES for axis in ("tp", "pp", "ep") if axis != "ep" or family.startswith(EXPERTS)
]


def marked(family: str, *more: str) -> Any:
    return pytest.param(family, *more, marks=() if family in GATE else pytest.mark.full)


@pytest.fixture
def packs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests' matrices are small, and their last blocks mostly padding: they are packed all the same."""
    monkeypatch.setattr(split, "is_worth", lambda size, plain: True)
    monkeypatch.setattr(packing, "_most", lambda nbytes: 1 << 30)
    monkeypatch.setattr(packing, "_LEAST_NUMBERS", 1)
    room = packing._room
    monkeypatch.setattr(packing, "_room", lambda header: room(header) + 64 * 1024)


def save_both(family: str, save_random_model: Any, tmp_path: Path, form: Form) -> tuple[Path, Path]:
    """A family's checkpoint in bfloat16, and the same packed."""
    save_family(family, save_random_model, tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {name: value.bfloat16() if value.dtype == torch.float32 else value for name, value in tensors.items()}
    save_file(plain, source / "model.safetensors")
    (source / "config.json").write_text((tmp_path / "config.json").read_text())
    report = pack(source, tmp_path / form, form)
    assert report.packed_tensors > 3
    verify(tmp_path / form, source)
    return source, tmp_path / form


def load(path: Path, backend: BackendName, weights: Any = "Plain", **options: Any) -> CausalLM:
    return load_model(path, device=CPU, dtype=torch.bfloat16, backend=backend, weights=weights, **options)


def answers(model: CausalLM, paged_sequences: Any) -> Iterator[torch.Tensor]:
    run = three_sequences(model, paged_sequences)
    for new in steps():
        yield run.step({row: [token % model.vocab_size for token in tokens] for row, tokens in new.items()})


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@needs_kernels
@pytest.mark.usefixtures("packs_everything")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", [marked(family) for family in CASES])
def test_every_family_answers_as_its_source(
    family: str, form: Form, save_random_model: Any, paged_sequences: Any, tmp_path: Path
) -> None:
    source, packed = save_both(family, save_random_model, tmp_path, form)
    expected = list(answers(load(source, BackendName.NATIVE), paged_sequences))
    for weights in ("Plain", "Lossless"):
        assert equal(answers(load(packed, BackendName.NATIVE, weights), paged_sequences), expected)


@pytest.mark.usefixtures("packs_everything")
@pytest.mark.parametrize("form", FORMS)
def test_other_backends_read_them_too(
    form: Form, save_random_model: Any, paged_sequences: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without the CPU kernels, too."""
    monkeypatch.setattr(split_kernels, "_kernels", lambda: None)
    source, packed = save_both("llama", save_random_model, tmp_path, form)
    expected = answers(load(source, BackendName.TORCH), paged_sequences)
    assert equal(answers(load(packed, BackendName.TORCH), paged_sequences), expected)


@needs_kernels
@pytest.mark.usefixtures("packs_everything")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("family", "axis"), [marked(*share) for share in SHARES])
def test_every_share_is_that_of_the_source(
    family: str, form: Form, axis: str, save_random_model: Any, paged_sequences: Any, tmp_path: Path
) -> None:
    source, packed = save_both(family, save_random_model, tmp_path, form)

    def logits(path: Path, weights: str) -> list[list[torch.Tensor]]:
        def work(collective: Any) -> list[torch.Tensor]:
            options = {f"{axis}_rank": collective.rank, f"{axis}_size": 2, axis: collective}
            model = load(path, BackendName.NATIVE, weights, context=ParallelContext(**options))
            return list(answers(model, paged_sequences))

        return run_ranks(2, work)

    if axis == "pp":  # stages send to one another, which these ranks do not: what they hold is compared
        for rank in range(2):
            context = ParallelContext(pp_rank=rank, pp_size=2)
            models = [load(path, BackendName.NATIVE, "Lossless", context=context) for path in (source, packed)]
            assert _tensors(models[0]) == _tensors(models[1])
        return
    expected = logits(source, "Plain")
    for one, other in zip(logits(packed, "Lossless"), expected, strict=True):
        assert equal(one, other)


def _tensors(model: object) -> list[bytes]:
    """The bytes of all that a model holds, packed matrices as they are multiplied."""
    from tandem_worker.model.backends.native import library
    from tandem_worker.model.backends.native.layers import NativeLinear
    from tandem_worker.model.weighing import _parts

    found, seen, left = [], set(), [model]
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, NativeLinear) and thing.is_split:
            found.append(bits(library.unsplit(thing.weight, thing.out_features, thing.in_features)).tobytes())
        elif isinstance(thing, torch.Tensor):
            found.append(bits(thing).tobytes() if thing.dtype != torch.uint8 else b"")
        else:
            left.extend(_parts(thing))
    return sorted(found)


@needs_kernels
def test_fixed_is_taken_as_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole matrices, fused ones, and shares along both axes reach the kernels without a weight being decoded."""
    from tandem_worker.model.backends.native import library
    from tandem_worker.model.backends.native.packing import LosslessPacker, lay_out

    tensors = {"a": trained(640, 576), "b": trained(192, 576), "c": trained(250, 576)}
    source = write(tmp_path / "source", [tensors])
    pack(source, tmp_path / "packed", "fixed")
    read = LosslessSource(tmp_path / "packed", find_safetensors(tmp_path / "packed"))

    def refuse(*arguments: object) -> None:
        raise AssertionError("something was decoded")

    for kind in (SplitMatrix, LosslessSource):
        for name in ("decode", "_read"):
            if hasattr(kind, name):
                monkeypatch.setattr(kind, name, refuse)
    monkeypatch.setattr(library, "split", refuse)
    cases: list[tuple[list[str], Slice | None]] = [
        (["a"], None), (["a", "b", "c"], None), (["b", "a"], Slice(0, 64, 128)), (["a", "b"], Slice(1, 2, 300)),
    ]  # fmt: skip
    for names, piece in cases:
        memory = LosslessPacker().pack([_part(read, name, piece) for name in names])
        assert memory is not None
        assert library.is_split(memory)
        plain = torch.cat([_cut(tensors[name], piece) for name in names])
        expected = lay_out(plain)
        assert expected is not None
        assert torch.equal(library.unsplit(memory, *plain.shape).view(torch.int16), expected.view(torch.int16))


def _part(source: LosslessSource, name: str, piece: Slice | None) -> StoredPart:
    stored = source.stored(name)
    assert stored is not None
    return StoredPart(stored, piece)


def _cut(value: torch.Tensor, piece: Slice | None) -> torch.Tensor:
    return value if piece is None else value.narrow(piece.dim, piece.start, piece.stop - piece.start).contiguous()


@pytest.mark.parametrize("form", FORMS)
def test_pieces_are_those_of_the_source(form: Form, tmp_path: Path) -> None:
    source = write(tmp_path / "source", [small()])
    pack(source, tmp_path / form, form)
    plain: WeightSource = SafetensorsSource(find_safetensors(source))
    packed: WeightSource = LosslessSource(tmp_path / form, find_safetensors(tmp_path / form))
    assert set(packed.names()) == set(plain.names())
    assert "absent" not in packed
    for name in plain.names():
        assert packed.shape(name) == plain.shape(name)
        assert packed.dtype(name) == plain.dtype(name)
        shape = plain.shape(name)
        pieces = [None, *(Slice(dim, extent // 3, extent - extent // 4) for dim, extent in enumerate(shape))]
        for piece in pieces:
            one, other = plain.read(name, piece), packed.read(name, piece)
            assert one.shape == other.shape
            assert bytes(bits(one)) == bytes(bits(other))


@needs_kernels
@pytest.mark.usefixtures("packs_everything")
def test_the_log_says_how_many_matrices_are_in_12_bits(
    save_random_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, packed = save_both("llama", save_random_model, tmp_path, "fixed")
    with caplog.at_level(logging.INFO):
        load(packed, BackendName.NATIVE, "Lossless")
    (record,) = [entry for entry in caplog.records if "12 bits" in entry.message]
    assert json.loads(json.dumps(record.__dict__, default=str))["matrices"] > 3


@needs_kernels
@pytest.mark.usefixtures("packs_everything")
@pytest.mark.parametrize("cached", [True, False])
def test_auto_packs_what_no_cache_holds(
    cached: bool, save_random_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family("llama", save_random_model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    size = 2 * sum(tensor.numel() for tensor in tensors.values() if tensor.dim() > 1)
    tensors["model.layers.0.self_attn.rotary_emb.cos_cached"] = torch.zeros(64, 8)  # which nobody multiplies
    save_file(tensors, tmp_path / "model.safetensors")
    assert NATIVE.lossless is not None
    lossless = replace(NATIVE.lossless, count_cache_bytes=lambda: size if cached else size - 1)
    monkeypatch.setattr(loading, "find_backend", lambda _: replace(NATIVE, lossless=lossless))
    told: list[FormChoice] = []
    model = load(tmp_path, BackendName.NATIVE, "Auto", told=told.append)
    assert [choice.form for choice in told] == ["plain" if cached else "lossless"]
    assert ("lossless" in count_matrices(model)) == (not cached)


@needs_kernels
def test_auto_asks_nothing_of_tensors_that_the_model_does_not_take(save_random_model: Any, tmp_path: Path) -> None:
    """They may be of no layout that is known: what is wrong with them is said in a sentence, as of all others."""
    save_family("llama", save_random_model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"extra.qweight": torch.zeros(2, 2, 2, dtype=torch.int32)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    told = config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(StartupError, match=r"extra\.weight"):
        load(tmp_path, BackendName.NATIVE, "Auto")
