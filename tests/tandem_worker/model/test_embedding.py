"""Which checkpoints compute embeddings, and which of their pipelines are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tandem_worker.host.errors import StartupError
from tandem_worker.model.embedding import read_embedding_spec
from tandem_worker.model.pooling import EmbeddingSpec, Pooling


def lay(folder: Path, kinds: list[str], pooling: dict[str, Any]) -> None:
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"st.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("kinds", "pooling", "expected"),
    [
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode_lasttoken": True}, (Pooling.LAST, True)),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
         (Pooling.MEAN, False)),
        (["Transformer", "Pooling"], {"pooling_mode": "cls", "include_prompt": True}, (Pooling.CLS, False)),
    ],
)  # fmt: skip
def test_pipelines(tmp_path: Path, kinds: list[str], pooling: dict[str, Any], expected: tuple[Pooling, bool]) -> None:
    lay(tmp_path, kinds, pooling)
    assert read_embedding_spec(tmp_path, 8) == EmbeddingSpec(pooling=expected[0], normalize=expected[1], size=8)


@pytest.mark.parametrize(
    ("kinds", "pooling", "says"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_lasttoken": True}, "Dense"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "max_tokens"),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls"),
        (["Transformer", "Pooling"], {}, "nothing"),
    ],
)
def test_pipelines_that_cannot_be_served(tmp_path: Path, kinds: list[str], pooling: dict[str, Any], says: str) -> None:
    lay(tmp_path, kinds, pooling)
    with pytest.raises(StartupError, match=says) as refusal:
        read_embedding_spec(tmp_path, 8)
    assert refusal.value.reason == "UnsupportedEmbedding"


@pytest.mark.parametrize("place", ["../other", "/etc", "a/b", "..", "a\0"])
def test_a_module_lies_beside_the_list(tmp_path: Path, place: str) -> None:
    lay(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_lasttoken": True})
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[1]["path"] = place
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(StartupError, match="not a folder beside it") as refusal:
        read_embedding_spec(tmp_path, 8)
    assert refusal.value.reason == "ConfigInvalid"


def test_without_modules_it_generates(tmp_path: Path) -> None:
    assert read_embedding_spec(tmp_path, 8) is None
