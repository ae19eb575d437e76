"""What the documentation names is there: metrics, fields, chart values, files, sections, commands, reasons.

A name that is not there any more is worse than none when somebody looks for the cause of an outage.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from tandem_api.launch import GatewayConfig, WorkerConfig
from tandem_api.telemetry import Metric

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
MEMBERS = ["api", "operator", "gateway", "worker"]
PACKAGES = {f"tandem_{member}": ROOT / member / "src" / f"tandem_{member}" for member in MEMBERS}
FOLDERS = [
    ROOT,
    ROOT / "e2e",
    *PACKAGES.values(),
    *(each for top in (*PACKAGES.values(), ROOT / "tests") for each in top.rglob("*") if each.is_dir()),
]
"""Where a file that a page names may lie: some name it from the package that they are about."""

NAMED = {
    "metric": r"\btandem_(?:worker|gateway|operator)_[a-z_]*[a-z]\b(?![.(])",
    "alert": r"`(Tandem[A-Z]\w+)`",
    "environment variable": r"\bTANDEM_[A-Z_]+\b",
    "header": r"\bx-tandem-[a-z-]*[a-z]\b",
    "label or annotation": r"\btandem\.dev/[a-z-]*[a-z]\b",
}
SOURCES = ["*.py", "*.yaml", "*.tpl", "Makefile", "Dockerfile"]


@cache
def read_sources() -> str:
    folders = [*PACKAGES.values(), ROOT / "charts", ROOT / "e2e", ROOT / "bench", ROOT / "tests" / "tandem_operator"]
    folders.append(ROOT / "tests" / "clients")
    files = {
        path for folder in folders for kind in SOURCES for path in folder.rglob(kind) if ".cache" not in path.parts
    }
    files.add(ROOT / "tests" / "shares.py")
    return "\n".join(path.read_text() for path in sorted(files))


@cache
def list_words() -> set[str]:
    return set(re.findall(r"[A-Za-z_][\w-]*(?:\.dev/[a-z-]*[a-z])?", read_sources()))


def list_fields(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tree of a schema's fields; None where anything may stand."""
    schema = schema.get("items", schema)
    if "properties" not in schema:
        return None if schema.get("type", "object") == "object" else {}
    return {name: list_fields(each) for name, each in schema["properties"].items()}


def list_values(values: object) -> dict[str, Any] | None:
    if not isinstance(values, dict):
        return {}
    return {name: list_values(each) for name, each in values.items()} or None


def list_model(model: type[BaseModel]) -> dict[str, Any]:
    """The tree of a launch configuration, by the names that its JSON has."""
    schema = model.model_json_schema(by_alias=True)

    def resolve(part: Mapping[str, Any]) -> dict[str, Any]:
        reference = next((each["$ref"] for each in (part, *part.get("anyOf", [])) if "$ref" in each), None)
        part = part if reference is None else schema["$defs"][reference.rpartition("/")[2]]
        return {name: resolve(each) for name, each in part.get("properties", {}).items()}

    return resolve(schema)


@cache
def read_trees() -> list[dict[str, Any]]:
    crd = yaml.safe_load((ROOT / "crds" / "tandem.dev_inferencemodels.yaml").read_text())
    whole = list_fields(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    assert whole is not None
    chart = list_values(yaml.safe_load((ROOT / "charts" / "tandem" / "values.yaml").read_text()))
    assert chart is not None
    spec = whole["spec"]
    parts = [each for each in spec.values() if each]
    return [whole, spec, whole["status"], *parts, chart, list_model(WorkerConfig), list_model(GatewayConfig)]


def has_path(tree: dict[str, Any] | None, parts: list[str]) -> bool:
    if not parts or tree is None:
        return True
    if parts[0] == "*":
        return any(has_path(each, parts[1:]) for each in tree.values())
    return parts[0] in tree and has_path(tree[parts[0]], parts[1:])


def list_code(text: str) -> Iterator[str]:
    """What stands between back-quotes on a line, and indented commands."""
    for block in re.split(r"```.*?```", text, flags=re.DOTALL):
        yield from re.findall(r"`([^`\n]+)`", block)


def slug(heading: str) -> str:
    """The anchor of a heading, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def read_anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize("kind", NAMED)
def test_names_are_in_the_sources(page: Path, kind: str) -> None:
    found = set(re.findall(NAMED[kind], page.read_text()))
    # The library adds `_total` to a counter's name, and `_bucket` to a histogram's.
    spellings = {name: {name, re.sub("_(total|bucket|sum|count)$", "", name)} for name in found}
    assert [name for name in sorted(found) if not spellings[name] & list_words()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fields_and_chart_values_are_there(page: Path) -> None:
    text = page.read_text()
    found = {code for code in list_code(text) if re.fullmatch(r"[a-z]\w*(\.(\w+|\*))+(=\S*)?", code)}
    path = r"(?:spec|status)(?:\.(?:[A-Za-z]\w*|\*))+"
    found |= set(re.findall(r"--set ([\w.]+)", text)) | set(re.findall(rf"(?<![.\w]){path}", text))
    found |= {each for line in re.findall(r"get im .*", text) for each in re.findall(rf"\{{\.({path})", line)}
    trees = read_trees()
    wrong: list[str] = []
    for code in sorted(found):
        parts = code.partition("=")[0].split(".")
        if parts[-1] in {"py", "md", "json", "yaml", "txt", "toml", "lock", "safetensors", "crt", "key"}:
            continue
        at_home = [tree for tree in trees if parts[0] in tree]
        if at_home and not any(has_path(tree, parts) for tree in at_home):
            wrong.append(code)
    assert wrong == [], wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        place, _, anchor = target.partition("#")
        path = page.parent / place if place else page
        if not path.exists() or (anchor and anchor not in read_anchors(path)):
            wrong.append(target)
    assert wrong == [], wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_modules_are_there(page: Path) -> None:
    text = page.read_text()
    files = {code for code in list_code(text) if re.fullmatch(r"[\w./*-]+\.(py|yaml|txt|svg|toml)", code)}
    folders = {code for code in list_code(text) if re.fullmatch(r"([a-z][a-z0-9_-]*/)+", code)}
    made = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    named = sorted(each for each in files | folders if each.strip("/") not in made)
    wrong = [each for each in named if not any(any(folder.glob(each)) for folder in FOLDERS)]
    for module in set(re.findall(r"\btandem_(?:api|operator|gateway|worker)(?:\.\w+)+", text)):
        package, *parts = module.split(".")
        path = PACKAGES[package]
        for part in parts:
            if not (path / part).exists() and not (path / f"{part}.py").exists():
                if not (path.is_file() and part in path.read_text()):
                    wrong.append(module)
                break
            path = path / part if (path / part).exists() else path / f"{part}.py"
    assert wrong == [], wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_programs_are_there(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^    |^)make ([a-z0-9-]+)", text, flags=re.MULTILINE))
    assert sorted(named - targets) == []
    programs = set(re.findall(r"python3? -m ((?:bench|e2e)[\w.]*)", text))
    missing = [name for name in programs if not any((ROOT / name.replace(".", "/")).glob("__main__.py"))]
    assert [name for name in missing if not (ROOT / (name.replace(".", "/") + ".py")).exists()] == []


def test_reasons_of_conditions_are_there() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.partition("| Reason | Stalled |")[2].partition("\n\n")[0]
    reasons = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")
    }
    assert len(reasons) > 60
    assert [name for name in sorted(reasons) if f'"{name}"' not in read_sources()] == []


def list_reasons(tree: ast.AST) -> Iterator[str]:
    """Reasons that this module gives: of a worker that ends, and of whatever has a `reason`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found = [each.value for each in node.keywords if each.arg == "reason"]
            if ast.unparse(node.func).rpartition(".")[2] in {"StartupError", "end_process"}:
                found += node.args
            for each in found:
                if isinstance(each, ast.Constant) and re.fullmatch("[A-Z][A-Za-z]+", str(each.value)):
                    yield str(each.value)


def test_every_reason_is_explained() -> None:
    files = [path for name in ("tandem_operator", "tandem_worker") for path in PACKAGES[name].rglob("*.py")]
    reasons = {reason for path in files for reason in list_reasons(ast.parse(path.read_text()))}
    text = "".join((ROOT / "docs" / page).read_text() for page in ("operations.md", "models.md"))
    assert len(reasons) > 60
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in text] == []


def test_every_metric_is_explained() -> None:
    text = "".join(page.read_text() for page in PAGES)
    names = {name for key, name in vars(Metric).items() if key.isupper()}
    names |= set(
        re.findall(r"tandem_operator_\w+", (PACKAGES["tandem_operator"] / "runtime" / "metrics.py").read_text())
    )
    assert len(names) > 50
    assert [name for name in sorted(names) if f"`{name}" not in text] == []
