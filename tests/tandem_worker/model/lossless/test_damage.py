"""A packed checkpoint that is cut, flipped, mixed up, or lies: it is told with file and tensor, or does no harm."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.checkpoint.files import find_safetensors
from tandem_worker.model.checkpoint.header import LENGTH
from tandem_worker.model.checkpoint.lossless import LosslessSource
from tandem_worker.model.checkpoint.packed_folder import FORMS, LIST, RECORD, DamagedError, Form, read_list
from tandem_worker.model.checkpoint.safetensors import SafetensorsSource
from tandem_worker.model.lossless.__main__ import main
from tandem_worker.model.lossless.packing import pack
from tandem_worker.model.lossless.unpacking import unpack, verify

from tests.tandem_worker.model.lossless.checkpoints import INDEX, bits, hashes, small, trained, write, write_packed

Bits = dict[str, bytes]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Form, tuple[Path, Bits]]:
    """Of each form a packed checkpoint, and the bits that its source has."""
    found = {}
    for form in FORMS:
        source, packed = write_packed(tmp_path_factory.mktemp(form), form)
        found[form] = packed, read_all(SafetensorsSource(find_safetensors(source)))
    return found


def read_all(source: WeightSource) -> Bits:
    return {name: bits(source.read(name)).tobytes() for name in source.names()}


def load(folder: Path) -> Bits:
    return read_all(LosslessSource(folder, find_safetensors(folder)))


def load_or_reason(folder: Path) -> Bits | str:
    try:
        return load(folder)
    except StartupError as error:
        return error.reason


def reason(folder: Path) -> str:
    with pytest.raises(StartupError) as caught:
        load(folder)
    assert caught.value.reason == "WeightsCorrupt"
    return str(caught.value)


def copy(folder: Path, target: Path, *, changed: str, content: bytes | None) -> Path:
    """The folder with one other file; the rest is linked, so thousands of them cost nothing."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != changed:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target / name)
    if content is not None:
        (target / changed).parent.mkdir(parents=True, exist_ok=True)
        (target / changed).write_bytes(content)
    return target


def damage(content: bytes, source: random.Random) -> bytes:
    """The bytes with one of the things that happen to files."""
    kind, at = source.randrange(6), source.randrange(len(content))
    if kind == 0:  # a bit
        return content[:at] + bytes([content[at] ^ 1 << source.randrange(8)]) + content[at + 1 :]
    if kind == 1:  # the end is missing
        return content[:at]
    if kind == 2:  # a page of zeros
        return content[:at] + bytes(min(512, len(content) - at)) + content[at + 512 :]
    if kind == 3:  # something is behind it
        return content + source.randbytes(1 + at % 100)
    if kind == 4:  # two places have changed places
        other = source.randrange(len(content))
        low, high = min(at, other), max(at, other)
        return content[:low] + content[high:] + content[low:high]
    size = source.randrange(1, 64)  # some other bytes
    return content[:at] + source.randbytes(min(size, len(content) - at)) + content[at + size :]


def check_damaged(form: Form, checkpoints: dict[Form, tuple[Path, Bits]], folder: Path, seed: int) -> None:
    """Refused by reason, or of the same bits."""
    packed, expected = checkpoints[form]
    source = random.Random(seed)
    files = [path for path in sorted(packed.rglob("*")) if path.is_file() and path.stat().st_size]
    path = source.choice(files)
    content = path.read_bytes()
    # Headers are short beside what follows them, and have more that can be wrong.
    end = int.from_bytes(content[:LENGTH], "little") + LENGTH
    if path.suffix == ".safetensors" and source.random() < 0.5:
        changed = damage(content[:end], source) + content[end:]
    else:
        changed = damage(content, source)
    name = path.relative_to(packed).as_posix()
    copied = copy(packed, folder, changed=name, content=changed)
    found = load_or_reason(copied)
    if isinstance(found, str):
        assert found in {"WeightsCorrupt", "WeightsIncomplete"}
        return
    assert found == expected
    with pytest.raises(DamagedError) if changed != content else _nothing():
        verify(copied)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


@pytest.mark.parametrize("form", FORMS)
def test_damaged_checkpoints_are_told(form: Form, checkpoints: dict[Form, tuple[Path, Bits]], tmp_path: Path) -> None:
    for seed in range(150):
        check_damaged(form, checkpoints, tmp_path / str(seed), seed)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", FORMS)
def test_five_thousand_damaged_checkpoints_of_each_form_are_told(
    form: Form, checkpoints: dict[Form, tuple[Path, Bits]], tmp_path: Path
) -> None:
    for seed in range(150, 5150):
        check_damaged(form, checkpoints, tmp_path / str(seed), seed)


def weight_files(packed: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(packed.glob("*.safetensors")):
        yield path.name, path.read_bytes()


def sign(folder: Path, name: str) -> None:
    """Write the list anew, as if the file were the one that was written: what a liar would do."""
    raw: dict[str, Any] = json.loads((folder / LIST).read_text())
    content = (folder / name).read_bytes()
    end = int.from_bytes(content[:LENGTH], "little") + LENGTH
    raw["files"][name]["packed"] |= {"size": len(content), "header": hashlib.sha256(content[:end]).hexdigest()}
    sign_list(folder, raw)


def sign_list(folder: Path, raw: dict[str, Any]) -> None:
    raw.pop("sum")
    text = json.dumps(raw, indent=1, sort_keys=True)
    (folder / LIST).unlink()
    (folder / LIST).write_text(json.dumps({**raw, "sum": hashlib.sha256(text.encode()).hexdigest()}))


@pytest.mark.parametrize("form", FORMS)
def test_headers_that_lie_are_told(form: Form, checkpoints: dict[Form, tuple[Path, Bits]], tmp_path: Path) -> None:
    packed, expected = checkpoints[form]
    source = random.Random(5)
    told = 0
    for number, (name, content) in enumerate(list(weight_files(packed)) * 60):
        end = int.from_bytes(content[:LENGTH], "little") + LENGTH
        changed = damage(content[LENGTH:end], source)
        folder = copy(
            packed, tmp_path / str(number), changed=name,
            content=len(changed).to_bytes(LENGTH, "little") + changed + content[end:],
        )  # fmt: skip
        sign(folder, name)
        found = load_or_reason(folder)
        if isinstance(found, str):
            assert found == "WeightsCorrupt"
            told += 1
        else:  # a name, or what no program reads
            assert sorted(map(len, found.values())) == sorted(map(len, expected.values()))
    assert told > 50


def rewrite(folder: Path, name: str, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Let `change` edit the header and the record of a file, and sign the result."""
    content = (folder / name).read_bytes()
    end = int.from_bytes(content[:LENGTH], "little") + LENGTH
    header = json.loads(content[LENGTH:end])
    note = json.loads(header["__metadata__"][RECORD])
    note["header"] = json.loads(note["header"])
    change(header, note)
    data = max(told["data_offsets"][1] for key, told in note["header"].items() if key != "__metadata__")
    note["header"] = json.dumps(note["header"])
    header["__metadata__"][RECORD] = json.dumps(note)
    text = json.dumps(header).encode()
    (folder / name).unlink()
    (folder / name).write_bytes(len(text).to_bytes(LENGTH, "little") + text + content[end:])
    sign(folder, name)
    raw = json.loads((folder / LIST).read_text())
    raw["files"][name]["size"] = LENGTH + len(note["header"]) + data
    sign_list(folder, raw)


EMBEDDING = "model.embed_tokens.weight"
HUGE = 1 << 40


def _grow(header: dict[str, Any], note: dict[str, Any]) -> None:
    """An embedding of a terabyte, and every offset behind it."""
    tensors = [told for key, told in note["header"].items() if key != "__metadata__"]
    end = note["header"][EMBEDDING]["data_offsets"][1]
    more = HUGE - 2 * 250 * 64
    for told in tensors:
        told["data_offsets"] = [at + (more if at >= end else 0) for at in told["data_offsets"]]
    note["header"][EMBEDDING]["shape"] = [HUGE // 128, 64]
    start, stop = note["header"][EMBEDDING]["data_offsets"]
    assert stop - start == HUGE


@pytest.mark.parametrize("form", FORMS)
def test_sizes_that_lie_allocate_nothing(
    form: Form, checkpoints: dict[Form, tuple[Path, Bits]], tmp_path: Path
) -> None:
    packed, _ = checkpoints[form]
    name = next(name for name, _ in weight_files(packed))
    folder = copy(packed, tmp_path / "x", changed="", content=None)
    rewrite(folder, name, lambda header, note: None)
    load(folder)  # what `rewrite` makes is read
    rewrite(folder, name, _grow)
    text = reason(folder)
    assert name in text
    assert EMBEDDING in text
    assert "too few" in text


@pytest.mark.parametrize("form", FORMS)
def test_file_and_tensor_are_named(form: Form, checkpoints: dict[Form, tuple[Path, Bits]], tmp_path: Path) -> None:
    packed, _ = checkpoints[form]
    name, content = next(weight_files(packed))
    end = int.from_bytes(content[:LENGTH], "little") + LENGTH
    place = json.loads(content[LENGTH:end])[EMBEDDING]["data_offsets"][0] + end + 100
    changed = content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
    folder = copy(packed, tmp_path / "x", changed=name, content=changed)
    text = reason(folder)
    assert name in text
    assert EMBEDDING in text
    with pytest.raises(DamagedError, match=EMBEDDING):
        verify(folder)
    with pytest.raises(DamagedError, match=EMBEDDING):
        unpack(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_parts_of_two_checkpoints_are_told(checkpoints: dict[Form, tuple[Path, Bits]], tmp_path: Path) -> None:
    packed, _ = checkpoints["fixed"]
    tensors = list(small().items())
    again = {name: trained(*tensor.shape, seed=9) if name == EMBEDDING else tensor for name, tensor in tensors}
    source = write(tmp_path / "source", [dict(list(again.items())[:5]), dict(list(again.items())[5:])])
    pack(source, tmp_path / "other", "fixed")
    pack(source, tmp_path / "archive", "archive")
    for other in ("other", "archive"):
        for path in (tmp_path / other).glob("*.safetensors"):
            content = path.read_bytes()
            if content != (packed / path.name).read_bytes():
                mixed = copy(packed, tmp_path / f"{other} {path.name}", changed=path.name, content=content)
                assert path.name in reason(mixed)
    mixed = copy(packed, tmp_path / "list", changed=LIST, content=(tmp_path / "other" / LIST).read_bytes())
    assert "safetensors" in reason(mixed)


def test_tensors_that_changed_places_are_told(checkpoints: dict[Form, tuple[Path, Bits]], tmp_path: Path) -> None:
    tensors = {"one": trained(64, 128, seed=1), "two": trained(64, 128, seed=2)}
    pack(write(tmp_path / "source", [tensors]), tmp_path / "packed", "archive")
    path = tmp_path / "packed" / "model.safetensors"
    content = path.read_bytes()
    end = int.from_bytes(content[:LENGTH], "little") + LENGTH
    header = json.loads(content[LENGTH:end])
    header["one"], header["two"] = header["two"], header["one"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - LENGTH)
    path.write_bytes(content[:LENGTH] + text + content[end:])
    sign(tmp_path / "packed", path.name)
    assert "damaged" in reason(tmp_path / "packed")


def test_a_packed_file_without_its_list_is_told(checkpoints: dict[Form, tuple[Path, Bits]], tmp_path: Path) -> None:
    packed, _ = checkpoints["fixed"]
    folder = copy(packed, tmp_path / "x", changed=LIST, content=None)
    with pytest.raises(StartupError, match=LIST) as caught:
        SafetensorsSource(find_safetensors(folder))
    assert caught.value.reason == "WeightsCorrupt"


def test_a_plain_file_beside_packed_ones_is_told(checkpoints: dict[Form, tuple[Path, Bits]], tmp_path: Path) -> None:
    packed, _ = checkpoints["fixed"]
    raw = json.loads((packed / INDEX).read_text())
    name = sorted(set(raw["weight_map"].values()))[0]
    plain = (packed.parent / "source" / name).read_bytes()
    assert name in reason(copy(packed, tmp_path / "x", changed=name, content=plain))


def test_a_list_that_leads_out_of_the_folder_is_none(
    checkpoints: dict[Form, tuple[Path, Bits]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, _ = checkpoints["fixed"]
    folder = copy(packed, tmp_path / "x", changed="", content=None)
    raw = json.loads((folder / LIST).read_text())
    raw["files"]["../../out.txt"] = raw["files"].pop("config.json")
    sign_list(folder, raw)
    with pytest.raises(DamagedError, match="no path"):
        read_list(folder)
    assert main(["unpack", str(folder), str(tmp_path / "back")]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "out.txt").exists()


def test_hashes_tell_files_apart(tmp_path: Path) -> None:
    """The oracle of these tests."""
    (tmp_path / "a").write_bytes(b"1")
    one = hashes(tmp_path)
    (tmp_path / "a").write_bytes(b"2")
    assert one != hashes(tmp_path)
    assert not np.array_equal(bits(torch.zeros(2)), bits(torch.ones(2)))
