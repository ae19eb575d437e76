"""The commands that pages, examples, the chart's notes and the demo print for people to type.

`list_commands` finds them; `judge` says where each can be run. One that no rule knows is an error of whoever wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.settings import ROOT
from e2e.demo import MODEL, describe_next

PROGRAMS = (
    "kubectl", "helm", "make", "curl", "docker", "python", "python3", r"\.venv/bin/\w+", "grep", "export", "sudo",
)  # fmt: skip
_COMMAND = re.compile(rf"(?:\w+=\S*\s+)*(?:{'|'.join(PROGRAMS)})(?:\s|$)")


@dataclass(frozen=True, slots=True, order=True)
class Command:
    place: str
    line: str

    def __str__(self) -> str:
        return f"{self.place}: {self.line}"


def list_commands() -> list[Command]:
    """Each once, in the order of pages."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [Command(_name(page), line) for page in pages for line in _of_page(page.read_text())]
    for file in sorted((ROOT / "examples").rglob("*.yaml")):
        header = "\n".join(line[1:] for line in file.read_text().splitlines() if line.startswith("#"))
        found += [Command(_name(file), line) for line in _of_blocks(header, indent=3)]
    notes = ROOT / "charts" / "tandem" / "templates" / "NOTES.txt"
    # As they read where no namespace is named.
    text = re.sub(r"{{ if [^}]*}}(?:{{[^}]*}}|[^{])*{{ else }}(.*?){{ end }}", r"\1", notes.read_text())
    found += [Command(_name(notes), line) for line in _of_blocks(text, indent=2)]
    found += [Command("make demo", line) for line in _of_demo()]
    return list(dict.fromkeys(found))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _of_page(text: str) -> Iterator[str]:
    blocks = re.findall(r"^```(?:bash|sh|shell|console)?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    for block in blocks:
        yield from _of_blocks(block, indent=0)
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from _of_blocks(rest, indent=4)
    for code in re.findall(r"`([^`\n]+)`", rest):
        if _COMMAND.match(code) and " " in code:
            yield code


def _of_blocks(text: str, *, indent: int) -> Iterator[str]:
    """Lines that are commands, those that go on in the next one joined, without the comments behind them."""
    lines = iter(re.sub(r"\\\n\s*", "", text).splitlines())
    for line in lines:
        if line[:indent].strip() or not _COMMAND.match(line[indent:]):
            continue
        command = re.sub(r"(\s+#|\s{2,}[A-Za-z]\w* [`\w]).*$", "", line[indent:]).strip()
        if command.endswith("<<'EOF'"):
            command = "\n".join(
                [command, *(each[indent:] for each in iter(lambda: next(lines), " " * indent + "EOF")), "EOF"]
            )
        yield command


def _of_demo() -> Iterator[str]:
    """Columns are apart by three spaces and more; the first one says what for."""
    text = re.sub(r"\\\n\s*", "", describe_next("CONFIG"))
    for line in text.splitlines():
        for cell in re.split(r"\s{3,}", line.strip()):
            yield from (part.strip() for part in cell.split(";") if _COMMAND.match(part.strip()))


# --- where each is run ------------------------------------------------------------------------------------------------

API, TARGET, MODULE, HELM, SHOWN = "API server", "target", "module", "helm", "shown"

RULES: tuple[tuple[str, str, str], ...] = (
    (r"(\w+=\S+ )*make ", TARGET, ""),
    (r"python3? -m |\.venv/bin/python -m ", MODULE, ""),
    (r"(docker|buildah|helm registry) login$", SHOWN, "wants the reader's password"),
    (r"helm (--wait|template|install$|uninstall$|upgrade$|upgrade --install --take-ownership$)", SHOWN,
     "names a command or a flag in a sentence"),
    (r"helm .*oci://", SHOWN, "of a released chart: tests/charts/test_release.py and e2e/suite/test_release.py run it"),
    (r"helm ", HELM, ""),
    (r"kubectl .*(port-forward|exec|logs)\b", SHOWN, "needs a pod that runs: e2e/suite/test_typed.py runs it"),
    (r"curl ", SHOWN, "asks a port that the line before it forwards: e2e/suite/test_typed.py asks the same"),
    (r"kubectl .*(custom\.metrics|describe hpa|apiservice)", SHOWN, "of another API server: make e2e-external"),
    (r"kubectl .*(-n argocd|podmonitors|httproute)", SHOWN, "of types that other projects install"),
    (r"kubectl .*proxy/telemetry", SHOWN, "goes by the kubelet's network to a pod"),
    (r"kubectl create secret tls", SHOWN, "wants the reader's certificate: e2e/suite/test_tls.py makes one"),
    (r"kubectl (apply|wait|wait --for=condition=Ready|explain|scale|rollout status|"
     r"get|describe pod|describe pvc|delete pod --force|get -o yaml --show-managed-fields)$", SHOWN,
     "names a command in a sentence"),
    (r"kubectl get endpointslice kubernetes", SHOWN, "a server that is alone on a loopback address has none"),
    (r"kubectl ", API, ""),
    (r"docker info$", SHOWN, "names a command in a sentence"),
    (r"docker build ", SHOWN, "make cluster builds the same file"),
    (r"sudo ip route", SHOWN, "changes the reader's machine"),
    (r"export ", SHOWN, "sets a variable"),
    (r"grep ", SHOWN, "in a worker's container: e2e/suite/test_typed.py runs it"),
    (r"\.venv/bin/pytest e2e/suite -k NAME", SHOWN, "with a name of the reader's"),
    (r"python3? (-c |bench/|examples/)|\.venv/bin/python examples/", SHOWN,
     "a file of the repository, which the client tests and make soak-kv run"),
)  # fmt: skip


def judge(command: Command) -> tuple[str, str]:
    """Where it is run, and why not where it is only shown. Raises KeyError for one that no rule knows."""
    for pattern, where, reason in RULES:
        if re.match(pattern, command.line):
            return where, reason
    raise KeyError(f"{command}: no rule of e2e/pages.py says where this command can be run")


def fill_in(line: str) -> str:
    """With the names of a model that is there instead of NAME and the like."""
    for word, name in (("NAME-3", f"{MODEL}-1"), ("NAMESPACE", "default"), ("MODEL", MODEL), ("NAME", MODEL)):
        line = re.sub(rf"\b{word}\b", name, line)
    return re.sub(r"\bPOD\b", f"{MODEL}-decode-0", line)
