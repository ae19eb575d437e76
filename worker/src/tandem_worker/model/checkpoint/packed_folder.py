"""What a packed checkpoint says of itself: a list of its files, and a record in the header of each packed one.

    tandem_lossless.json    form, and of every file of the source its size and SHA-256; of a packed one also its size
                            here and the SHA-256 of its header; last the SHA-256 of the list itself
    X.safetensors           tensors of the source under their names and in their order, the packed ones as bytes; in the
                            metadata of its header, under `tandem.lossless`, a record: the form, the source's header as
                            it was, the names of packed tensors, and a sum of every 4 MiB of every tensor

So the list vouches for the headers, and these for every byte behind them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from xxhash import xxh3_128_hexdigest

from tandem_worker.host.errors import WorkerError
from tandem_worker.model.checkpoint.files import PACKED_LIST, PACKED_RECORD, is_inner_path
from tandem_worker.model.checkpoint.header import HeaderError

LIST, RECORD = PACKED_LIST, PACKED_RECORD
CHUNK = 4 << 20
"""Bytes of a tensor under one sum."""
_FORMAT = "tandem lossless 1"
_MOST = 64 << 20
"""Bytes of a list."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SUM = re.compile(r"[0-9a-f]{32}")

Form = Literal["fixed", "archive"]
FORMS: tuple[Form, ...] = get_args(Form)


class DamagedError(WorkerError):
    """A packed checkpoint is not what was written. The message names the file, and the tensor where it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRecord:
    """What became of a file of tensors."""

    size: int
    header: str
    """SHA-256 of its length and header."""
    tensors: int
    packed_tensors: int
    packed_weights: int
    """Weights of its packed tensors, and their bytes here."""
    packed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of the source."""

    size: int
    sha256: str
    packed: PackedRecord | None = None
    """None: it lies here as it was."""

    @property
    def size_here(self) -> int:
        """Bytes of the file in the packed folder."""
        return self.size if self.packed is None else self.packed.size


@dataclass(frozen=True, slots=True)
class PackedList:
    form: Form
    files: Mapping[str, FileRecord]
    """Records of the files, by path within the folder."""

    def write(self) -> bytes:
        """The text of the list."""
        files = {name: asdict(record) for name, record in sorted(self.files.items())}
        for told in files.values():
            if told["packed"] is None:
                del told["packed"]
        body = {"format": _FORMAT, "form": self.form, "files": files}
        return _text({**body, "sum": _sum(body)}).encode()


def _text(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True)


def _sum(body: Mapping[str, object]) -> str:
    return hashlib.sha256(_text(body).encode()).hexdigest()


def read_list(folder: Path) -> PackedList:
    """The list of the packed checkpoint in `folder`. Raises DamagedError, and OSError when it cannot be read."""
    path = folder / LIST
    if path.stat().st_size > _MOST:
        raise DamagedError(f"{LIST} is longer than any list of files.")
    try:
        raw = json.loads(path.read_bytes())
        told = raw.pop("sum")
        if raw["format"] != _FORMAT:
            raise DamagedError(f"{LIST} has format {raw['format']!r:.60}; this program reads {_FORMAT!r}.")
        if told != _sum(raw):
            raise DamagedError(f"{LIST} does not have the sum that was written with it.")
        files = {name: _read_file(name, file) for name, file in raw["files"].items()}
        form = raw["form"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{LIST} cannot be read: {error!r:.200}") from error
    if form not in FORMS:
        raise DamagedError(f"{LIST} names a form {form!r:.60} that there is not.")
    return PackedList(cast("Form", form), files)


def _read_file(name: str, told: Any) -> FileRecord:
    packed = told.get("packed")
    record = FileRecord(
        size=told["size"], sha256=told["sha256"], packed=None if packed is None else PackedRecord(**packed)
    )
    numbers = [record.size]
    digests = [record.sha256]
    if record.packed is not None:
        numbers += [value for key, value in asdict(record.packed).items() if key != "header"]
        digests.append(record.packed.header)
    if not is_inner_path(name) or name == LIST:
        raise ValueError(f"{name!r:.100} is no path of a file in it")
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"the size of {name!r:.100} is none")
    if not all(isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in digests):
        raise ValueError(f"a digest of {name!r:.100} is none")
    return record


@dataclass(frozen=True, slots=True)
class FileNote:
    """What the header of a packed file says beside the places of its tensors."""

    form: Form
    header: str
    """The header of the source's file."""
    packed: frozenset[str]
    sums: Mapping[str, tuple[str, ...]]
    """XXH3, 128 bits, of every `CHUNK` bytes of each tensor."""

    def write(self) -> str:
        """As it stands in the metadata."""
        told = {"form": self.form, "header": self.header, "packed": sorted(self.packed), "sums": self.sums}
        return json.dumps(told, sort_keys=True, separators=(",", ":"))


def read_note(text: str) -> FileNote:
    """Raises HeaderError for anything that `FileNote.write` does not give."""
    try:
        raw = json.loads(text)
        form, header = raw["form"], raw["header"]
        sums = {str(name): tuple(found) for name, found in raw["sums"].items()}
        packed = frozenset(raw["packed"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise HeaderError(f"the record in its header cannot be read: {error!r:.200}") from error
    every = [value for found in sums.values() for value in found]
    if form not in FORMS or not isinstance(header, str) or not packed <= sums.keys():
        raise HeaderError("the record in its header is none")
    if not all(isinstance(value, str) and _SUM.fullmatch(value) for value in every):
        raise HeaderError("the record in its header has sums that are none")
    return FileNote(cast("Form", form), header, packed, sums)


def sum_of(chunk: Any) -> str:
    """The sum of at most `CHUNK` bytes."""
    return xxh3_128_hexdigest(chunk)


def num_sums(nbytes: int) -> int:
    """Sums of a tensor of so many bytes."""
    return -(-nbytes // CHUNK)
