"""Commands of the pages that need pods that run: logs, exec, port-forward, and what is asked of a forwarded port.

`e2e.pages` finds them; here they are typed at the fleet that tests share, with its names instead of the pages'.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.cluster.settings import ROOT
from e2e.pages import Command, judge, list_commands
from e2e.suite.fleet import Fleet

ELSEWHERE = (
    (r"8443|jaeger|smollm2-traced", "of an example that the shared fleet is not"),
    (r"…", "a name that is not written out"),
    (r"--previous", "of a container that has ended"),
    (r"qwen3-decode-0 -- sh", "curl in another engine's image"),
    (r"previous_response_id|/rerank|\$TOKEN", "of an answer, a model or a key that the reader has"),
    (r"(logs|exec|port-forward|-- )$|localhost:3000", "names a command in a sentence, or a browser's page"),
)
TYPED = [
    command
    for command in list_commands()
    if "test_typed" in judge(command)[1] and not any(re.search(pattern, command.line) for pattern, _ in ELSEWHERE)
]
PORTS = {"8080": ("svc/main", "80"), "9090": ("deploy/main", "9090"), "URL": ("svc/main", "80")}
"""What a page's `localhost:PORT` is of, where the line itself does not forward it."""
NAMES = r"\b(NAME|MODEL|smollm2|qwen3)(?=\b|-)"


class Typist:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        path = f"{fleet.cluster.kubectl_path.parent}:{os.environ['PATH']}"
        self._environment = os.environ | {"KUBECONFIG": str(fleet.cluster.kubeconfig), "PATH": path}

    def run(self, line: str) -> str:
        line = re.sub(r"^kubectl ", f"kubectl -n {self._fleet.namespace} ", line) if " -n " not in line else line
        follows = line.endswith(" -f")
        done = subprocess.run(
            ["timeout", "5" if follows else "400", "bash", "-c", line], cwd=ROOT, env=self._environment,
            capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode in ({124} if follows else {0}), f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def forward(self, target: str, port: str) -> Iterator[str]:
        """The local port, which is any: others use this machine too."""
        command = ["kubectl", "-n", self._fleet.namespace, "port-forward", target, f":{port}"]
        process = subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, text=True)
        with process:  # closes what it prints to
            assert process.stdout is not None
            try:
                found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
                assert found is not None, command
                yield found[1]
            finally:
                process.kill()


@pytest.mark.parametrize("command", TYPED, ids=lambda command: re.sub(r"[^\w./=-]+", "_", str(command))[:100])
def test_a_command_for_pods_that_run(main: Fleet, command: Command) -> None:
    typist = Typist(main)
    line = re.sub(r"decode-\d", "decode-0", re.sub(NAMES, "main", command.line)).replace("POD", "main-decode-0")
    if line.startswith("grep "):
        line = f"kubectl exec main-decode-0 -c worker -- sh -c '{line}'"
    forwarded = re.match(r"kubectl port-forward (\S+) ([\d: ]+?) *(?:&|$) *(.*)", line)
    if forwarded:
        target, ports, line = forwarded.groups()
        _, _, port = ports.split()[0].rpartition(":")
    elif found := re.search(r"localhost:(\d+)|\$TANDEM_(URL)|\b(URL)/", line):
        target, port = PORTS[next(filter(None, found.groups()))]
    else:
        typist.run(line)
        return
    with typist.forward(target, port) as local:
        line = re.sub(r"(?:http://)?localhost:\d+|\$TANDEM_URL|\bURL(?=/)", f"http://127.0.0.1:{local}", line)
        # A small model may go on for thousands of tokens where nobody bounds it.
        line = re.sub(r"(/chat/completions .*-d '\{)", r'\1"max_tokens": 16, ', line)
        line = re.sub(r"(/responses .*-d '\{)", r'\1"max_output_tokens": 16, ', line)
        if shutil.which("jq") is None:
            line = re.sub(r" \| jq .*", "", line)
        answer = typist.run(line.replace("curl ", "curl --fail -sS ")) if line else "forwarded"
        assert answer


def test_the_rest_has_a_reason() -> None:
    """No pattern is there for nobody."""
    lines = [command.line for command in list_commands() if "test_typed" in judge(command)[1]]
    assert [pattern for pattern, _ in ELSEWHERE if not any(re.search(pattern, line) for line in lines)] == []
    assert len(TYPED) > 15
