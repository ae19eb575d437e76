"""The counter of rooms and arrows, on packages small enough to count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.rooms import (
    find_circles,
    find_package,
    list_classes,
    list_long,
    list_packages,
    measure,
    print_table,
    read_modules,
)


def lay_out(root: Path, files: dict[str, str], layers: str = "") -> None:
    for name, text in files.items():
        path = root / "part/src/toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    contract = f'[[tool.importlinter.contracts]]\ntype = "layers"\ncontainers = ["toy"]\nlayers = [{layers}]\n'
    (root / "pyproject.toml").write_text(contract)


FILES = {
    "__init__.py": "",
    "high/__init__.py": "",
    "high/one.py": "from toy.low.two import f\nfrom toy.low import two\nfrom toy.high import other\n",
    "high/other.py": "import toy.alone\n",
    "low/__init__.py": "",
    "low/two.py": "def f():\n    from toy.high.one import g\n",
    "alone.py": "",
}


def test_arrows_are_counted_between_rooms_also_inside_functions(tmp_path: Path) -> None:
    lay_out(tmp_path, FILES, '"high", "low | alone"')
    found = measure(tmp_path, "toy")
    assert [found[name] for name in ("files", "rooms", "arrows between rooms")] == ["7", "3", "3"]
    assert (found["upward arrows"], found["circles of rooms"], found["circles of files"]) == ("1", "1", "1")


def test_rooms_in_one_row_do_not_know_each_other(tmp_path: Path) -> None:
    lay_out(tmp_path, FILES, '"low", "high | alone"')
    assert measure(tmp_path, "toy")["upward arrows"] == "2", "from high to low, and from high to its neighbour"


def test_a_package_within_another_has_rooms_of_its_own(tmp_path: Path) -> None:
    lay_out(tmp_path, FILES | {"high/deep/__init__.py": "", "high/deep/under.py": "from toy.high import one\n"})
    found = measure(tmp_path, "toy.high")
    assert [found[name] for name in ("files", "rooms", "arrows between rooms")] == ["5", "3", "2"]


def test_without_a_contract_nothing_is_called_upward(tmp_path: Path) -> None:
    lay_out(tmp_path, FILES, '"high"')
    assert measure(tmp_path, "toy")["upward arrows"] == "no order to tell by"
    with pytest.raises(ValueError, match="no folder"):
        find_package(tmp_path, "toys")


def test_a_circle_is_whoever_reaches_each_other() -> None:
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e"}}) == [{"a", "b", "c"}]


def test_large_classes_and_long_files_are_named(tmp_path: Path) -> None:
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(16))
    few = methods.replace("    def m0(self): ...\n", "")
    lay_out(tmp_path, FILES | {"alone.py": f"class Large:\n{methods}\nclass Small:\n{few}" + "\n" * 400})
    folder = find_package(tmp_path, "toy")
    assert list_classes(read_modules(folder)) == ["Large 16"]
    assert [name.split()[0] for name in list_long(folder)] == ["alone.py"]


def test_the_table_has_a_row_for_each_contract_that_a_checkout_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[2]
    assert {"tandem_api", "tandem_worker.engine"} <= set(list_packages(root))
    lay_out(tmp_path, FILES)
    print_table(tmp_path)
    said = capsys.readouterr().out
    assert "tandem_api" not in said, "another checkout need not have it"
    assert "classes of more than 15 methods: 0" in said
