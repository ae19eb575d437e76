"""Images on the way into containerd: the pause image, the local registry, pulls ahead of the first pod."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from ..commands import run, succeeds, wait_until
from ..disk import check_disk
from ..errors import ClusterError
from ..images.buildah import Buildah
from ..images.catalog import Image
from ..progress import say, step
from ..settings import ClusterSettings
from .components import PAUSE_IMAGE, REGISTRY_HOST, REGISTRY_PORT, ClusterPlan
from .network import Addresses
from .registry import Leases, mark_used

MANIFEST_TYPES = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
NAMESPACE = "k8s.io"


def choose_containerd_root(cache: Path, state: Path) -> Path:
    """The cache's image store, or one of this cluster's own while another cluster uses the cache's."""
    return state / "containerd-root" if is_locked(cache) else cache / "containerd"


def is_locked(cache: Path) -> bool:
    """Whether a cluster uses the cache's image store: containerd holds a lock on its database as long as it runs."""
    database = cache / "containerd" / "io.containerd.metadata.v1.bolt" / "meta.db"
    if not database.exists():
        return False
    with database.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        return False


def ctr(state: Path, *arguments: str | Path, timeout: float | None = 60) -> str:
    socket = state / "containerd" / "containerd.sock"
    return run("ctr", "--address", socket, "--namespace", NAMESPACE, *arguments, timeout=timeout)


def prepare_containerd(plan: ClusterPlan, restart: Callable[[], None]) -> None:
    """Wait for containerd, remove containers of an earlier cluster from its store, and give it the pause image."""
    _wait_for_containerd(plan)
    if stale := ctr(plan.state, "containers", "list", "-q").split():
        ctr(plan.state, "containers", "delete", *stale)
        restart()  # its CRI plugin has already taken the old containers into its books
        _wait_for_containerd(plan)
    if PAUSE_IMAGE not in ctr(plan.state, "images", "list", "-q").split():
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "pause.tar"
            write_single_program_image(archive, PAUSE_IMAGE, plan.programs["pause"])
            ctr(plan.state, "images", "import", "--snapshotter", plan.snapshotter, archive)


def push_pause(plan: ClusterPlan) -> None:
    """Let the registry have the pause image: a kubelet that runs out of disk deletes even that, and pulls it again."""
    hosts = plan.state / "containerd" / "certs.d"
    ctr(plan.state, "images", "push", "--hosts-dir", hosts, PAUSE_IMAGE)


def _wait_for_containerd(plan: ClusterPlan) -> None:
    wait_until(lambda: succeeds("ctr", "--address", plan.containerd_socket, "version"), "containerd's socket", 30)


def write_single_program_image(archive: Path, reference: str, program: Path) -> None:
    """A Docker archive of one layer with one static program, which is also the entry point."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        entry = tarfile.TarInfo(program.name)
        entry.size, entry.mode = program.stat().st_size, 0o755
        with program.open("rb") as content:
            tar.addfile(entry, content)
    content = layer.getvalue()
    config = {
        "architecture": run("go", "env", "GOARCH").strip(),
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(content).hexdigest()]},
    }
    config_name = hashlib.sha256(json.dumps(config).encode()).hexdigest() + ".json"
    manifest = [{"Config": config_name, "RepoTags": [reference], "Layers": ["layer.tar"]}]
    members = {
        config_name: json.dumps(config).encode(),
        "layer.tar": content,
        "manifest.json": json.dumps(manifest).encode(),
    }
    with tarfile.open(archive, "w") as tar:
        for name, body in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            tar.addfile(entry, io.BytesIO(body))


def load(settings: ClusterSettings, puller: Path, addresses: Addresses, wanted: list[Image]) -> dict[str, str]:
    """Build, push and pull every image that is not where it should be; returns references by part.

    containerd holds these images and no older ones afterwards. Running containers keep their own snapshots.
    """
    references = {image.part: publish(settings, addresses, image) for image in wanted}
    needed = {reference.removeprefix(f"{REGISTRY_HOST}/") for reference in [*references.values(), PAUSE_IMAGE]}
    Leases(settings.cache).write(settings.id, settings.state, needed)
    socket = f"unix://{settings.state / 'containerd' / 'containerd.sock'}"
    pulled = run(puller, "-socket", socket, "-keep", PAUSE_IMAGE, *references.values(), timeout=1200)
    for reference, seconds in (line.split("\t") for line in pulled.splitlines()):
        if float(seconds) >= 0.5:
            say(f"pulled {reference} into containerd … {seconds} s")
    return references


def publish(settings: ClusterSettings, addresses: Addresses, image: Image) -> str:
    """Build an image from `settings.root` and push it to the local registry, unless that has it. Its reference."""
    registry = f"{addresses.node}:{REGISTRY_PORT}"
    buildah = Buildah(settings)
    tag = buildah.tag(image)
    leases = Leases(settings.cache)
    with leases.pushing():
        leases.write(settings.id, settings.state, leases.read(settings.id) | {f"{image.name}:{tag}"})
        if not has_manifest(registry, image.name, tag):
            check_disk(settings.cache, "warm")
            buildah.build(image, tag)
            with step(f"pushed {image.name}", quiet_below=0.5):
                buildah.push(image, tag, registry, verify_tls=False)
        mark_used(settings.cache / "registry", image.name, tag)
    return f"{REGISTRY_HOST}/{image.name}:{tag}"


def has_manifest(registry: str, name: str, tag: str) -> bool:
    url = f"http://{registry}/v2/{name}/manifests/{tag}"
    request = urllib.request.Request(url, headers={"Accept": MANIFEST_TYPES}, method="HEAD")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10):
            return True
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        raise ClusterError(f"the local registry answers {error.code} for {name}:{tag}") from error
    except OSError as error:
        raise ClusterError(f"the local registry does not answer at {registry}: {error}") from error
