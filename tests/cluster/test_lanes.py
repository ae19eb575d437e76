"""Which tests of the suite share a lane, and in which order they begin."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from e2e.suite.lanes import FIRST, LAST, SHARED, SHARED_FILES, arrange, find_stale, write_groups

SUITE = Path(__file__).resolve().parents[2] / "e2e" / "suite"


class Item:
    def __init__(self, name: str, *fixtures: str, module: str = "e2e.suite.test_x") -> None:
        self.name = self.nodeid = name
        self.fixturenames = fixtures
        self.module = SimpleNamespace(__name__=module)


def arranged(*items: Item) -> list[Item]:
    found: list[Any] = list(items)
    arrange(found)
    return found


def test_tests_of_one_fleet_are_one_group_and_others_have_none(tmp_path: Path) -> None:
    items = [Item("test_a", "main"), Item("test_b", "fleet"), Item("test_c", "pair"), Item("test_d", "fleet", "main")]
    write_groups(items, tmp_path / "groups.json")
    assert json.loads((tmp_path / "groups.json").read_text()) == {"test_a": "main", "test_c": "pair", "test_d": "main"}


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


def test_pytest_xdist_keeps_a_group_in_one_lane(tmp_path: Path) -> None:
    """With the suite's own scheduling, in processes of their own."""
    (tmp_path / "conftest.py").write_text(
        "from e2e.suite.conftest import ("
        "pytest_collection_modifyitems, pytest_configure_node, pytest_unconfigure, pytest_xdist_make_scheduler)\n"
        "import pytest\n@pytest.fixture\ndef main(): pass\n"
    )
    (tmp_path / "test_x.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('n', range(6))\ndef test_a(main, n, record_property): print('lane', os.getpid())\n"
        "@pytest.mark.parametrize('n', range(3))\ndef test_b(n): pass\n"
    )
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadscope", "-rP",
        "--rootdir", str(tmp_path), str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(SUITE.parents[1])}, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert len(set(re.findall(r"^lane \d+$", done.stdout, re.M))) == 1, done.stdout
