"""Compiled kernels go from one start to the next: by Triton's own compiler and cache, which need no GPU for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tandem_worker.model.prepared.kernels import PreparedKernels, describe_sources
from tandem_worker.model.prepared.store import PreparedStore

FACTS = {"gpu": "H100 (9, 0)", "driver": "580", "triton": "3.6.0", "sources": "a"}
COMPILE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def twice(x_ptr, N: tl.constexpr):
    place = x_ptr + tl.arange(0, N)
    tl.store(place, tl.load(place) * 2)

source = ASTSource(twice, {"x_ptr": "*fp32", "N": "constexpr"}, {"N": 64}, {})
made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(len(made.asm["cubin"]))
"""


def compile_twice(folder: Path, program: Path) -> subprocess.CompletedProcess[str]:
    program.write_text(COMPILE)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def store(tmp_path: Path) -> PreparedStore:
    return PreparedStore(tmp_path / "prepared")


def fill(folder: Path, names: tuple[str, ...] = ("AAAA/k.cubin", "AAAA/k.json", "BBBB/launcher.so")) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 100)


def test_a_second_start_compiles_nothing(tmp_path: Path, store: PreparedStore) -> None:
    program, one, two = tmp_path / "program.py", tmp_path / "one", tmp_path / "two"
    first = compile_twice(one, program)
    assert first.returncode == 0, first.stderr
    assert PreparedKernels(store, one, FACTS).save()
    assert PreparedKernels(store, two, FACTS).restore() > 2

    def files(folder: Path) -> dict[str, int]:
        return {str(file.relative_to(folder)): file.stat().st_mtime_ns for file in folder.rglob("*.*")}

    restored = files(two)
    assert restored.keys() == files(one).keys()
    again = compile_twice(two, program)
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert files(two) == restored


def test_what_is_kept_comes_back_with_names_and_rights(tmp_path: Path, store: PreparedStore) -> None:
    fill(tmp_path / "one")
    kernels = PreparedKernels(store, tmp_path / "one", FACTS)
    assert kernels.restore() == 0
    assert kernels.save()
    other = PreparedKernels(store, tmp_path / "two", FACTS)
    assert other.restore() == 3
    assert (tmp_path / "two/BBBB/launcher.so").read_bytes() == b"BBBB/launcher.so" * 100
    assert os.access(tmp_path / "two/BBBB/launcher.so", os.X_OK)
    assert sorted(path.name for path in (tmp_path / "two").rglob("*.*")) == ["k.cubin", "k.json", "launcher.so"]


@pytest.mark.parametrize("fact", FACTS)
def test_other_facts_are_other_kernels(fact: str, tmp_path: Path, store: PreparedStore) -> None:
    fill(tmp_path / "one")
    assert PreparedKernels(store, tmp_path / "one", FACTS).save()
    assert PreparedKernels(store, tmp_path / "two", {**FACTS, fact: "another"}).restore() == 0
    assert not (tmp_path / "two").exists()


def test_a_damaged_copy_is_removed_and_told_and_nothing_of_it_is_put_back(
    tmp_path: Path, store: PreparedStore, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "one")
    kernels = PreparedKernels(store, tmp_path / "one", FACTS)
    assert kernels.save()
    (file,) = store.folder.iterdir()
    content = bytearray(file.read_bytes())
    content[700] ^= 1
    file.write_bytes(content)
    assert PreparedKernels(store, tmp_path / "two", FACTS).restore() == 0
    assert not (tmp_path / "two").exists()
    assert not file.exists()
    assert "is damaged and is prepared anew" in caplog.text
    assert kernels.save(), "the next start has a copy again"


def test_only_new_kernels_are_written_again(tmp_path: Path, store: PreparedStore) -> None:
    fill(tmp_path / "one")
    assert PreparedKernels(store, tmp_path / "one", FACTS).save()
    (file,) = store.folder.iterdir()
    before = file.stat().st_ino
    second = PreparedKernels(store, tmp_path / "two", FACTS)
    second.restore()
    assert second.save()
    assert file.stat().st_ino == before
    fill(tmp_path / "two", ("CCCC/more.cubin",))
    assert second.save()
    assert file.stat().st_ino != before
    assert PreparedKernels(store, tmp_path / "three", FACTS).restore() == 4


def test_what_a_full_disk_cut_short_is_kept_by_nobody(tmp_path: Path, store: PreparedStore) -> None:
    fill(tmp_path / "one", ("AAAA/k.cubin", "AAAA/.tandem-0123456789abcdef"))
    kernels = PreparedKernels(store, tmp_path / "one", FACTS)
    assert kernels.save()
    assert PreparedKernels(store, tmp_path / "two", FACTS).restore() == 1
    assert [path.name for path in (tmp_path / "two" / "AAAA").iterdir()] == ["k.cubin"]


def test_an_archive_that_would_write_elsewhere_is_refused(
    tmp_path: Path, store: PreparedStore, caplog: pytest.LogCaptureFixture
) -> None:
    import io
    import tarfile

    kernels = PreparedKernels(store, tmp_path / "inside" / "one", FACTS)
    for place in ("../../escaped.py", "/tmp/escaped", "AAAA/../../escaped"):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.addfile(tarfile.TarInfo(place), io.BytesIO())
        assert store.write(kernels.name, packed.getvalue())
        assert kernels.restore() == 0
    assert "is no place of a kernel" in caplog.text
    assert not list(tmp_path.rglob("escaped*"))


def test_a_read_only_cache_costs_time_alone(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    fill(tmp_path / "one")
    kernels = PreparedKernels(PreparedStore(blocked / "prepared"), tmp_path / "one", FACTS)
    assert kernels.restore() == 0
    assert not kernels.save()


def test_other_sources_have_another_digest(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    first = describe_sources(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    second = describe_sources(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, describe_sources(tmp_path)}) == 3
