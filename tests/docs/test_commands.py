"""What pages print for people to type: each command has a rule that says where it runs, and what it names is there.

`e2e/suite/test_commands.py` runs them against an API server.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.util import find_spec

import pytest

from e2e.demo import describe_next
from e2e.pages import MODULE, SHOWN, TARGET, Command, judge, list_commands
from tests.docs.test_claims import ROOT

COMMANDS = list_commands()
MAKEFILE = (ROOT / "Makefile").read_text()


def lines(where: str) -> list[str]:
    return [command.line for command in COMMANDS if judge(command)[0] == where]


def test_commands_are_found_where_they_are_printed() -> None:
    places = {command.place for command in COMMANDS}
    assert {"README.md", "make demo", "docs/operations.md", "charts/tandem/templates/NOTES.txt"} <= places
    assert len(COMMANDS) > 200


def test_every_command_has_a_rule() -> None:
    for command in COMMANDS:
        where, reason = judge(command)
        assert bool(reason) == (where == SHOWN), command


def test_a_command_that_nobody_knows_is_named() -> None:
    with pytest.raises(KeyError, match=r"no rule of e2e/pages.py"):
        judge(Command("README.md", "minikube start"))


def test_what_a_reason_names_is_there() -> None:
    for command in COMMANDS:
        _, reason = judge(command)
        for file in re.findall(r"(?:e2e|tests)/[\w/]+\.py", reason):
            assert (ROOT / file).is_file(), reason


def test_targets_and_modules_are_there() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, flags=re.MULTILINE))
    for line in lines(TARGET):
        named = [word for word in shlex.split(line.partition("&&")[0]) if "=" not in word and not word.startswith(".")]
        assert set(named[1:]) <= targets, line
    for line in lines(MODULE):
        module = line.partition("-m ")[2].split()[0]
        assert module == "pip" or find_spec(module) is not None, line


def test_make_help_hides_nothing() -> None:
    described = set(re.findall(r"^([^\s.:%]+):.*##", MAKEFILE, flags=re.MULTILINE))
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[0] for line in re.sub(r"\x1b\[\d*m", "", shown).splitlines()} == described
    assert {"e2e", "e2e-full", "e2e-upgrade"} <= described


def test_the_demo_watches_one_type_at_a_time() -> None:
    """kubectl refuses to watch several."""
    for line in describe_next("CONFIG").splitlines():
        assert not re.search(r"get \w+,\w+ .*-w", line), line
