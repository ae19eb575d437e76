"""`python -m e2e.cluster up|load|status|env|down|leftovers`"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from . import mirror, storage
from .base import ClusterBackend
from .binaries.backend import BinariesBackend
from .choose import choose_backend
from .commands import run
from .connection import recorded_settings, write_record
from .disk import check_disk, is_warm
from .errors import ClusterError
from .gobuild import Builder, find_tool
from .images.catalog import IMAGES
from .kind import VOLUMES_ON_NODE
from .leftovers import check_leftovers
from .progress import say
from .settings import ClusterSettings, read_settings


def up(settings: ClusterSettings, backend: ClusterBackend) -> None:
    backend.check()
    check_disk(settings.cache, "warm" if is_warm(settings.cache) else "cold")
    settings.state.mkdir(parents=True, exist_ok=True)
    backend.up()
    builder = Builder(settings.go_modules, settings.cache)
    write_record(settings, backend, find_tool("kubectl", builder), find_tool("helm", builder))
    replenish_storage(settings, backend)
    say(f"Kubernetes ({backend.name}): export KUBECONFIG={backend.kubeconfig}")


def load(settings: ClusterSettings, backend: ClusterBackend) -> None:
    check_disk(settings.cache, "warm" if is_warm(settings.cache) else "images")
    references = backend.load(IMAGES)
    settings.images_file.write_text(json.dumps(references, indent=1))
    (settings.cache / "warm").touch()
    kubectl = make_kubectl(settings, backend)
    replenish_storage(settings, backend)
    mirror.deploy(kubectl, references["mirror"])
    for part, reference in references.items():
        say(f"{part:9} {reference}")


def make_kubectl(settings: ClusterSettings, backend: ClusterBackend) -> storage.Kubectl:
    program = find_tool("kubectl", Builder(settings.go_modules, settings.cache))
    return partial(run, program, "--kubeconfig", backend.kubeconfig)


def replenish_storage(settings: ClusterSettings, backend: ClusterBackend) -> None:
    """The volume pool, where the node's folders are this machine's."""
    if backend.name == "existing":
        return
    folder = settings.state / "volumes"
    on_node = VOLUMES_ON_NODE if backend.name == "kind" else str(folder)
    storage.replenish(make_kubectl(settings, backend), folder, on_node)


def down(settings: ClusterSettings, backend: ClusterBackend) -> None:
    backend.down()
    shutil.rmtree(settings.state, ignore_errors=True)
    say("the cluster is stopped; caches stay")


def leftovers(settings: ClusterSettings, backend: ClusterBackend) -> None:
    """Of a whole run of the gate, `down` included: whatever still runs or is mounted out of the checkout."""
    if isinstance(backend, BinariesBackend):
        check_leftovers(lambda: backend.leftovers(settings.root))
    say("nothing is left on the machine")


def status(settings: ClusterSettings, backend: ClusterBackend) -> None:
    found = backend.status()
    say(f"{backend.name}: {'running' if found.running else 'not running'} ({found.detail})")
    if not found.running:
        sys.exit(1)


def env(settings: ClusterSettings, backend: ClusterBackend) -> None:
    print(f"export KUBECONFIG={backend.kubeconfig}")


COMMANDS = {"up": up, "load": load, "status": status, "env": env, "down": down, "leftovers": leftovers}
HELP = {
    "up": "bring up a cluster, or find it up already",
    "load": "build Tandem's images, hand them to the cluster, and start the model mirror in it",
    "status": "say whether it runs",
    "env": "print what to evaluate in a shell",
    "down": "stop it; caches stay",
    "leftovers": "fail where something of this checkout still runs or is mounted, by name",
}


@contextmanager
def exclusive(settings: ClusterSettings) -> Iterator[None]:
    """One command at a time for one checkout: two would undo each other's work."""
    settings.state.parent.mkdir(parents=True, exist_ok=True)
    with (settings.state.parent / "cluster.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another command works on this cluster; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in HELP.items():
        commands.add_parser(name, help=text)
    command = parser.parse_args().command
    started = time.monotonic()
    try:
        settings = recorded_settings(read_settings())
        backend = choose_backend(settings)
        if command in {"status", "env", "leftovers"}:
            COMMANDS[command](settings, backend)
            return 0
        with exclusive(settings):
            COMMANDS[command](settings, backend)
    except ClusterError as error:
        print(f"cluster {command}: {error}", file=sys.stderr)
        return 1
    say(f"cluster {command}: {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
