"""Which tests of the suite share a lane, and in which order they begin."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from e2e.suite.lanes import FIRST, LAST, SHARED, SHARED_FILES, arrange, find_stale, join

SUITE = Path(__file__).resolve().parents[2] / "e2e" / "suite"


class Item:
    def __init__(self, name: str, *fixtures: str, module: str = "e2e.suite.test_x") -> None:
        self.name, self.fixturenames, self.groups = name, fixtures, list[str]()
        self.module = SimpleNamespace(__name__=module)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        assert mark.name == "xdist_group"
        self.groups += mark.args


def arranged(*items: Item) -> list[Item]:
    found: list[Any] = list(items)
    for item in found:
        join(item)
    arrange(found)
    return found


def test_tests_of_one_fleet_are_one_group_and_others_have_none() -> None:
    items = [Item("test_a", "main"), Item("test_b", "fleet"), Item("test_c", "pair"), Item("test_d", "fleet", "main")]
    arranged(*items)
    assert [item.groups for item in items] == [["main"], [], ["pair"], ["main"]]


def test_what_disturbs_the_shared_fleet_is_last_in_it() -> None:
    names = [item.name for item in arranged(Item("test_keys_rotate_x", "main"), Item("test_a", "main"))]
    assert names == ["test_a", "test_keys_rotate_x"]


def test_long_ones_begin_first_and_short_ones_last() -> None:
    short = Item("test_short", "fleet", module="e2e.suite.test_admission")
    usual = Item("test_usual", "fleet")
    long = Item(f"{FIRST[1]}[x]", "fleet")
    shared = Item("test_shared", "main")
    assert arranged(short, usual, long, shared) == [shared, long, usual, short]


def test_the_tables_name_what_there_is() -> None:
    trees = {path.stem: ast.parse(path.read_text()) for path in SUITE.glob("*.py")}
    functions = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    charts = {path.stem for path in (SUITE.parents[1] / "tests" / "charts").glob("*.py")}
    assert find_stale(sorted(functions)) == []
    assert set(SHARED) <= functions
    assert set(SHARED_FILES) <= trees.keys()
    assert set(LAST) <= {*SHARED_FILES.values(), *charts}
