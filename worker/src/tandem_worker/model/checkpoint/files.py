"""Which files of a model's folder hold the weights that are loaded."""

from __future__ import annotations

import json
from pathlib import Path

from tandem_worker.host.errors import StartupError

PACKED_LIST = "tandem_lossless.json"
"""Beside the weights of a packed checkpoint; `packed_folder` reads it."""
PACKED_RECORD = "tandem.lossless"
"""Key of what the header of a packed file says of itself."""
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def is_inner_path(name: str) -> bool:
    """Whether `name` is a plain path to something inside a folder."""
    parts = name.split("/")
    return all(part not in {"", ".", ".."} for part in parts) and not any(sign in name for sign in "\\\0")


def is_packed(folder: Path) -> bool:
    """Whether a packed checkpoint is in `folder`."""
    return (folder / PACKED_LIST).is_file()


def find_gguf(path: Path) -> Path | None:
    """The GGUF file meant by `path`, or None when it is a folder with other weights."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise StartupError(
            "WeightsAmbiguous",
            f"{path.name} holds {len(files)} GGUF files ({', '.join(file.name for file in files[:4])}). "
            "Name one of them in the model URI.",
        )
    return files[0] if files else None


def find_safetensors(folder: Path) -> list[Path]:
    """Files that the index names, or the one of the usual name, beside which others are the same weights in another
    layout, or all there are. Raises StartupError when one of the index is not there."""
    index = folder / _INDEX
    if not index.is_file():
        single = folder / _SINGLE
        return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError("WeightsCorrupt", f"{_INDEX} cannot be read: {error!r}") from error
    for name in names:
        if not is_inner_path(name):
            raise StartupError("WeightsCorrupt", f"{_INDEX} names {name!r}, which leads out of the model's folder.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise StartupError(
            "WeightsIncomplete", f"{len(missing)} of {len(names)} weight files are missing, among them {missing[0]}."
        )
    return [folder / name for name in names]
