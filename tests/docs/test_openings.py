"""A docstring reads by itself: its first word is not one that leans on the name above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import tandem_operator

LEANING = frozenset({"Of", "That", "By", "Whose", "Where"})
PACKAGES = (tandem_operator,)
"""Packages that are held to it: add one in the commit that makes it true of it."""


def list_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands by itself: of modules, classes and functions, and below fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def list_leaning(text: str) -> list[int]:
    return [line for line, said in list_docstrings(ast.parse(text)) if said.partition(" ")[0].strip(",:") in LEANING]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_docstrings_open_with_what_they_are_about(package: object) -> None:
    folder = Path(str(getattr(package, "__file__", ""))).parent
    files = list(folder.rglob("*.py"))
    assert len(files) > 50
    assert [f"{path.relative_to(folder)}:{line}" for path in files for line in list_leaning(path.read_text())] == []


def test_each_kind_of_docstring_is_found() -> None:
    assert list_leaning('"""Of a module."""') == [1]
    assert list_leaning('class A:\n    """Whose it is."""\n    b: int\n    """Where, by name."""') == [2, 4]
    assert list_leaning('def f() -> None:\n    """That it is."""\n    """Offered, once."""') == [2]
    assert list_leaning('"""Thatched roofs."""\nx = "Of no account"') == []
