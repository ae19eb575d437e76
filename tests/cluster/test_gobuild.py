"""Go programs are built once per content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cluster.gobuild import PROGRAMS, Program, content_key, parse_go_version
from e2e.cluster.settings import read_settings

PROGRAM = Program(name="program", module="module", package=".")


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "go.mod").write_text("module x")
    (tmp_path / "main.go").write_text("package main")
    return tmp_path


def test_the_key_is_stable(module: Path) -> None:
    assert content_key(PROGRAM, module, "go1.26") == content_key(PROGRAM, module, "go1.26")


@pytest.mark.parametrize("changed", ["go.mod", "go.sum", "main.go"])
def test_a_changed_file_changes_the_key(module: Path, changed: str) -> None:
    before = content_key(PROGRAM, module, "go1.26")
    (module / changed).write_text("changed")
    assert content_key(PROGRAM, module, "go1.26") != before


def test_another_compiler_changes_the_key(module: Path) -> None:
    assert content_key(PROGRAM, module, "go1.26") != content_key(PROGRAM, module, "go1.27")


def test_other_build_tags_change_the_key(module: Path) -> None:
    assert content_key(replace(PROGRAM, tags="small"), module, "go1.26") != content_key(PROGRAM, module, "go1.26")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_every_program_is_pinned(program: Program) -> None:
    folder = read_settings().go_modules / program.module
    assert (folder / "go.mod").is_file()
    if program.package.startswith("."):
        assert (folder / program.package / "main.go").is_file()
    else:
        assert program.package in (folder / "go.mod").read_text()


@pytest.mark.parametrize(("text", "version"), [("go1.26.8 linux amd64", (1, 26)), ("go version go1.21 x", (1, 21))])
def test_go_versions_are_read(text: str, version: tuple[int, int]) -> None:
    assert parse_go_version(text) == version


def test_something_else_is_no_go_version() -> None:
    with pytest.raises(ValueError, match="not a Go version"):
        parse_go_version("gopher")
