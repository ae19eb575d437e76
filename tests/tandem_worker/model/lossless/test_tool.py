"""`python -m tandem_worker.model.lossless`: every file comes back, its last line and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tandem_worker.model.checkpoint.packed_folder import FORMS, LIST, Form
from tandem_worker.model.lossless.__main__ import main
from tandem_worker.model.lossless.contract import UsageError
from tandem_worker.model.lossless.packing import pack
from tandem_worker.model.lossless.unpacking import unpack, verify

from tests.tandem_worker.model.lossless.checkpoints import (
    every_pattern,
    hashes,
    small,
    trained,
    write,
    write_packed,
)

FIELDS = {"form", "originalBytes", "packedBytes", "tensors", "packedTensors", "bitsPerWeight", "seconds"}
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    """Exit code, the last line of stdout as JSON, and stderr."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]) if out else None, err


@pytest.mark.parametrize("form", FORMS)
def test_there_and_back(form: Form, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = list(small().items())
    source = write(tmp_path / "source", [dict(tensors[:5]), dict(tensors[5:])])
    (source / "link.json").symlink_to(source / "config.json")
    code, made, _ = run(capsys, "pack", source, tmp_path / "packed", "--form", form)
    assert code == 0
    assert made.keys() == FIELDS
    assert made["tensors"] == len(tensors)
    assert made["packedTensors"] == {"fixed": 4, "archive": 5}[form]
    assert made["originalBytes"] == sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    assert made["packedBytes"] == sum(p.stat().st_size for p in (tmp_path / "packed").rglob("*") if p.is_file())
    code, checked, _ = run(capsys, "verify", tmp_path / "packed", "--against", source)
    assert code == 0
    assert {**checked, "seconds": 0} == {**made, "seconds": 0}
    code, back, _ = run(capsys, "unpack", tmp_path / "packed", tmp_path / "back")
    assert code == 0
    assert back.keys() == FIELDS
    assert hashes(tmp_path / "back") == hashes(source)


@pytest.mark.parametrize("form", FORMS)
def test_any_reader_lists_the_tensors(form: Form, tmp_path: Path) -> None:
    source = write(tmp_path / "source", [small()])
    pack(source, tmp_path / "packed", form)
    with (
        safe_open(tmp_path / "packed" / "model.safetensors", "pt") as packed,
        safe_open(source / "model.safetensors", "pt") as plain,
    ):
        assert set(packed.keys()) == set(plain.keys())
        assert torch.equal(packed.get_tensor("float"), plain.get_tensor("float"))
        assert packed.get_tensor("model.embed_tokens.weight").dtype == torch.uint8


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bytes_every_time(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", [small()])
    pack(source, tmp_path / "one", form)
    monkeypatch.setattr("tandem_worker.model.checkpoint.split_kernels._kernels", lambda: None)
    monkeypatch.setattr("tandem_worker.model.checkpoint.exponents.count_threads", lambda: 1)
    pack(source, tmp_path / "two", form)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")


def test_every_pattern_of_bfloat16(tmp_path: Path) -> None:
    source = write(tmp_path / "source", [{"w": every_pattern(), "wide": trained(64, 65536)}])
    for form in FORMS:
        report = pack(source, tmp_path / form, form)
        assert report.packed_tensors == 2
        unpack(tmp_path / form, tmp_path / f"back {form}")
        assert hashes(tmp_path / f"back {form}") == hashes(source)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.sampled_from((0, 1, 2, 3, 7, 64, 65)), max_size=3))
    if draw(st.booleans()):
        shape = [draw(st.sampled_from((64, 128, 200))), draw(st.sampled_from((2, 33, 64, 130)))]
    count = 1
    for extent in shape:
        count *= extent
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), generator=generator)
    patterns = raw.to(torch.uint8).view(dtype) if count else torch.empty(0, dtype=dtype)
    if dtype != torch.bfloat16 or draw(st.booleans()):
        return patterns.view(shape)
    return (torch.randn(shape, generator=generator) * 0.02).bfloat16()


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shards=st.lists(st.dictionaries(names, tensors(), max_size=4), min_size=1, max_size=3),
    form=st.sampled_from(FORMS),
)
def test_any_tensors_come_back(
    shards: list[dict[str, torch.Tensor]], form: Form, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    source = write(folder / "source", shards)
    pack(source, folder / "packed", form)
    verify(folder / "packed", source)
    unpack(folder / "packed", folder / "back")
    assert hashes(folder / "back") == hashes(source)


def test_an_empty_folder_is_taken_and_any_other_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", [small()])
    (tmp_path / "empty").mkdir()
    assert run(capsys, "pack", source, tmp_path / "empty", "--form", "fixed")[0] == 0
    code, line, err = run(capsys, "pack", source, tmp_path / "empty", "--form", "fixed")
    assert (code, line) == (2, None)
    assert "not empty" in err
    assert run(capsys, "unpack", tmp_path / "empty", source)[0] == 2


def test_wrong_usage_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", [small()])
    pack(source, tmp_path / "packed", "archive")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "more").symlink_to(source)
    for arguments, words in (
        (("pack", tmp_path / "absent", tmp_path / "t", "--form", "fixed"), "no folder"),
        (("pack", tmp_path / "packed", tmp_path / "t", "--form", "fixed"), "packed already"),
        (("pack", tmp_path / "gguf", tmp_path / "t", "--form", "fixed"), "no *.safetensors"),
        (("pack", tmp_path / "linked", tmp_path / "t", "--form", "fixed"), "link to a folder"),
        (("pack", source, source / "t", "--form", "fixed"), "within each other"),
        (("unpack", source, tmp_path / "t"), "no packed checkpoint"),
        (("verify", source), "no packed checkpoint"),
        (("verify", tmp_path / "packed", "--against", tmp_path / "absent"), "no folder"),
    ):
        code, line, err = run(capsys, *arguments)
        assert (code, line) == (2, None), arguments
        assert words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gguf", "linked", "packed", "source"]


@pytest.mark.parametrize("target", [".", "new/..", "volume"])
def test_what_no_folder_can_replace_is_told_before_anything_is_packed(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", [small()])
    (tmp_path / "here" if target != "volume" else tmp_path / "here" / "volume").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    before = sorted(tmp_path.rglob("*"))
    code, line, err = run(capsys, "pack", source, target, "--form", "fixed")
    assert (code, line) == (2, None)
    assert "name a new folder within it" in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("arguments", [[], ["pack", "a", "b"], ["pack", "a", "b", "--form", "small"], ["mend", "a"]])
def test_arguments_that_are_none_end_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_a_damaged_source_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", [small()])
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    code, _, err = run(capsys, "pack", source, tmp_path / "target", "--form", "archive")
    assert code == 1
    assert "model.safetensors" in err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_is_different_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, packed = write_packed(tmp_path, "fixed")
    (source / "config.json").write_text("{ }")
    code, _, err = run(capsys, "verify", packed, "--against", source)
    assert code == 1
    assert "config.json" in err
    (source / "config.json").unlink()
    assert "config.json is missing in the original" in run(capsys, "verify", packed, "--against", source)[2]
    save_file({"x": torch.zeros(2)}, packed / "other.safetensors")
    code, _, err = run(capsys, "verify", packed)
    assert code == 1
    assert "other.safetensors" in err


def test_a_file_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, packed = write_packed(tmp_path, "archive")
    (packed / "1_Pooling" / "config.json").unlink()
    for arguments in (("verify", packed), ("unpack", packed, tmp_path / "back")):
        code, _, err = run(capsys, *arguments)
        assert code == 1
        assert "1_Pooling/config.json is missing" in err
    assert not (tmp_path / "back").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", [small()])

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["pack", str(source), str(tmp_path / "target"), "--form", "fixed"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_file_system_that_does_not_sync_folders_takes_packed_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sync = write(tmp_path / "source", [small()]), os.fsync

    def sync_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_files)
    assert run(capsys, "pack", source, tmp_path / "packed", "--form", "fixed")[0] == 0
    assert run(capsys, "verify", tmp_path / "packed", "--against", source)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """A pod that ends while it packs, and somebody who cannot wait while it cleans up. The pipe holds the program up
    until it has been told to stop, and told again."""
    source = write(tmp_path / "source", [small()])
    script = (
        "import os, shutil, sys; import tandem_worker.model.lossless.packing as p\n"
        "def hold(work): return lambda *a, **k: [open(sys.argv.pop(), 'w').close(), os.read(0, 1), work(*a, **k)][-1]\n"
        "p.copy_file, shutil.rmtree = hold(p.copy_file), hold(shutil.rmtree)\n"
        "from tandem_worker.model.lossless.__main__ import main; sys.exit(main(sys.argv[1:6]))"
    )
    command = [sys.executable, "-c", script, "pack", str(source), str(tmp_path / "target"), "--form", "fixed"]
    began, cleans_up = tmp_path / "began", tmp_path / "cleans up"
    with subprocess.Popen([*command, str(cleans_up), str(began)], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        for step in (began, cleans_up):
            while not step.exists():
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(number)
        process.stdin.write(b".")
        process.stdin.flush()
        assert process.wait(60) == 128 + number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["began", "cleans up", "source"]


def test_neither_form_is_packed_again(tmp_path: Path) -> None:
    source = write(tmp_path / "source", [small()])
    pack(source, tmp_path / "packed", "fixed")
    (tmp_path / "packed" / LIST).unlink()
    with pytest.raises(UsageError, match="packed already"):
        pack(tmp_path / "packed", tmp_path / "again", "archive")
