from __future__ import annotations

import pytest
from tandem_worker.host.errors import StartupError
from tandem_worker.model.sources.selection import RepositoryFile, select_files


def chosen(*names: str) -> list[str]:
    return [file.path for file in select_files([RepositoryFile(name, 10) for name in names], "org/model")]


def test_shards_with_their_index() -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    assert chosen(*names, "consolidated.safetensors", "config.json", "eval.json", "README.md") == [
        "config.json", "model.safetensors.index.json", *names[:2],
    ]  # fmt: skip


def test_pooling_of_an_embedding_model() -> None:
    names = ("1_Pooling/config.json", "modules.json", "model.safetensors")
    assert chosen(*names, "2_Other/config.json", "onnx/model.onnx") == [*names]


def test_safetensors_before_gguf() -> None:
    assert chosen("a.Q8_0.gguf", "model.safetensors") == ["model.safetensors"]


def test_weights_of_another_name_but_no_adapters() -> None:
    assert chosen("weights.safetensors", "adapter_model.safetensors") == ["weights.safetensors"]


@pytest.mark.parametrize(
    ("names", "best"),
    [
        (["m.Q4_1.gguf"], "m.Q4_1.gguf"),
        (["m.Q4_K_M.gguf", "m.Q8_0.gguf", "m.Q2_K.gguf"], "m.Q8_0.gguf"),
        (["m-f32.gguf", "m-bf16.gguf", "mmproj-bf16.gguf"], "m-bf16.gguf"),
        (["m-IQ1_S.gguf", "m-q4_0.gguf"], "m-q4_0.gguf"),
    ],
)
def test_the_most_exact_gguf(names: list[str], best: str) -> None:
    assert chosen(*names) == [best]


def test_files_in_folders_are_left_out() -> None:
    assert chosen("onnx/model.safetensors", "model.safetensors", "original/config.json") == ["model.safetensors"]


def test_no_weights() -> None:
    with pytest.raises(StartupError, match="org/model has neither"):
        chosen("config.json", "adapter_model.safetensors")
