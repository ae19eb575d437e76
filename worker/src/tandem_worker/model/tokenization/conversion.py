"""Tokenizers that only transformers can make of their files: it does so in a process of its own, and ends with that.

A worker that serves has no use for it: half a second of imports, and 150 MB. What comes back is the library's object
and what belongs beside it; kept under the name of everything that it was made from, it is read at the next start.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import Tokenizer as Backend
from xxhash import xxh3_128

from tandem_worker.model.tokenization.tokenizer import Tokenizer, TokenizerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Format of what is kept. Another one is another name."""
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx")
_LARGEST = 256 << 20
"""Bytes of a file that says something about a tokenizer."""
_PR_SET_PDEATHSIG = 1
_REFUSED = 3
"""Exit status of the process when the files are no tokenizer; the reason is on its standard output."""


class PreparedFiles(Protocol):
    """Keeps results between starts. Neither method fails: without it a start only takes longer."""

    def read(self, name: str) -> bytes | None:
        """What was written under `name`, whole and undamaged, or None."""
        ...

    def write(self, name: str, payload: bytes) -> object:
        """Keep `payload` under `name`."""
        ...


def convert(path: Path, gguf: Path | None, metadata_bytes: int, prepared: PreparedFiles | None) -> Tokenizer:
    """The tokenizer of the checkpoint at `path`, which is a folder or, where `gguf` is given, beside that file. Of a
    GGUF file only the first `metadata_bytes` say something about it.

    Raises ValueError where the files are no tokenizer that a worker can use, OSError.
    """
    name = _name(path, gguf, metadata_bytes)
    kept = None if prepared is None else prepared.read(name)
    if kept is not None:
        try:
            return unpack(kept)
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("the tokenizer that is kept as %s cannot be read and is made anew: %s", name, error)
    payload = _run(path if gguf is None else gguf.parent, gguf)
    tokenizer = unpack(payload)
    if prepared is not None:
        prepared.write(name, payload)
    return tokenizer


def pack(tokenizer: Tokenizer) -> bytes:
    """Everything of it: a line of settings, and the library's own text."""
    return json.dumps(asdict(tokenizer.settings)).encode() + b"\n" + tokenizer.backend_tokenizer.to_str().encode()


def unpack(payload: bytes) -> Tokenizer:
    """Raises ValueError, TypeError, KeyError for what is not from `pack`."""
    head, _, body = payload.partition(b"\n")
    settings = json.loads(head)
    settings["extra_special_tokens"] = tuple(settings["extra_special_tokens"])
    try:
        backend = Backend.from_buffer(body)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(str(error)) from error
    return Tokenizer(backend, TokenizerSettings(**settings))


def adopt(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The same tokenizer without transformers. Raises ValueError for one that is computed in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        name = type(tokenizer).__name__
        raise ValueError(f"{name} has no fast tokenizer, which a worker needs")  # noqa: TRY004 - of files
    named: dict[str, str] = dict(tokenizer.special_tokens_map)
    others = [token for token in tokenizer.all_special_tokens if token not in named.values()]
    settings = TokenizerSettings(
        special_tokens=named,
        extra_special_tokens=tuple(others),
        chat_template=tokenizer.chat_template,
        model_max_length=int(tokenizer.model_max_length),
        split_special_tokens=bool(tokenizer.split_special_tokens),
        class_name=type(tokenizer).__name__,
    )
    return Tokenizer(Backend.from_str(backend.to_str()), settings)


def _name(path: Path, gguf: Path | None, metadata_bytes: int) -> str:
    """A hash of everything that the result depends on: the files, and the libraries."""
    found = xxh3_128(f"{_FORMAT} {version('transformers')} {version('tokenizers')}".encode())
    folder = path if gguf is None else gguf.parent
    if gguf is not None:
        with gguf.open("rb") as file:
            found.update(file.read(metadata_bytes))
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.name.endswith(_WEIGHTS) and file.stat().st_size <= _LARGEST:
            found.update(f"\0{file.relative_to(folder)}\0".encode())
            found.update(file.read_bytes())
    return f"tokenizer-{found.hexdigest()}"


def _run(folder: Path, gguf: Path | None) -> bytes:
    logger.info("transformers converts the tokenizer")
    command = [sys.executable, "-P", "-m", __name__, str(folder), *([] if gguf is None else [gguf.name])]
    quiet = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=quiet, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == _REFUSED:
        raise ValueError(done.stdout.decode(errors="replace"))
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"its conversion ended with status {done.returncode}: {last or 'it said nothing'}")
    return done.stdout


def _load(folder: str, gguf: str | None) -> PreTrainedTokenizerBase:
    _leave_torch_out()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if gguf is None:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # AutoTokenizer reads the weights' header as well and takes ten times as long.
    return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=gguf, local_files_only=True)


def _leave_torch_out() -> None:
    """Let transformers find no torch. Where it does it loads compilers, sharding and kernels along with the first
    configuration: two seconds of computing for nothing. What imports torch by itself still can."""
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # "not installed", to whoever looks for it
    from transformers.utils.import_utils import is_torch_available

    is_torch_available()  # remembers what it found
    del modules["torch"]


def main() -> None:
    """In the process of its own: writes the result to its standard output."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no part of the result
    try:
        payload = pack(adopt(_load(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)))
    except (OSError, ValueError, KeyError, ImportError) as error:
        output.write(str(error).encode(errors="replace"))
        output.close()
        sys.exit(_REFUSED)
    output.write(payload)
    output.close()


if __name__ == "__main__":
    main()
