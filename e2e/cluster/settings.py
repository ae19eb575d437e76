"""Where everything lives and what the environment asks for, read once at the start."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    root: Path
    """The repository."""
    cache: Path
    """Build results, image layers and the registry's storage: everything here is reproducible and survives `down`."""
    state: Path
    """The running cluster: keys, logs, process records. `down` removes it."""
    backend: str | None
    """TANDEM_CLUSTER: the backend asked for; None chooses."""
    kubeconfig: Path | None
    """KUBECONFIG: it chooses the backend `existing`."""
    registry: str | None
    """TANDEM_REGISTRY: where the backend `existing` pushes images, e.g. `registry.example.com/team`; with `http://` in
    front of it one that has no TLS."""
    base_image: str | None
    """TANDEM_BASE_IMAGE: the images' base; None takes the public slim Python, or else makes one."""
    node_image: str | None
    """TANDEM_NODE_IMAGE: the node of the backend `kind`; None takes kind's own."""
    ca_bundle: Path | None
    """The host's certificate authorities, handed to image builds."""

    @property
    def id(self) -> str:
        """Six characters that tell this checkout's cluster from another's on the same machine."""
        return hashlib.sha256(str(self.state).encode()).hexdigest()[:6]

    @property
    def has_gpu(self) -> bool:
        """Whether workers may meet a GPU: this machine has one, or the cluster is somebody else's."""
        if self.gpu is not None:
            return self.gpu
        return self.backend == "existing" or Path("/dev/nvidiactl").exists()

    gpu: bool | None = None
    """What a release says about its images; None: `has_gpu` looks."""
    install_packages: bool | None = None
    """TANDEM_INSTALL_PACKAGES: whether apt-get may install what the backend `binaries` lacks. None: whoever sits at the
    terminal is asked; where there is none, as in CI, it may."""

    def is_own(self, kubeconfig: Path) -> bool:
        """Whether this checkout's cluster wrote the file: what `make demo` says to export chooses nothing."""
        return kubeconfig.expanduser().resolve().is_relative_to(self.state.resolve())

    @property
    def go_modules(self) -> Path:
        return self.root / "e2e" / "cluster" / "go"

    @property
    def images_file(self) -> Path:
        return self.state / "images.json"

    @property
    def record_file(self) -> Path:
        """What `connect()` reads."""
        return self.state / "cluster.json"


def read_settings(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> ClusterSettings:
    """Settings from environment variables. An empty variable counts as unset."""

    def given(name: str) -> str | None:
        return environ.get(name) or None

    own = root / ".cache"
    cache = given("TANDEM_CACHE")
    kubeconfig = given("KUBECONFIG")
    return ClusterSettings(
        root=root,
        cache=Path(cache).expanduser().resolve() if cache else own,
        state=own / "cluster",
        backend=given("TANDEM_CLUSTER"),
        kubeconfig=Path(kubeconfig).expanduser() if kubeconfig else None,
        registry=given("TANDEM_REGISTRY"),
        base_image=given("TANDEM_BASE_IMAGE"),
        node_image=given("TANDEM_NODE_IMAGE"),
        ca_bundle=find_ca_bundle(environ),
        install_packages=_read_consent(given("TANDEM_INSTALL_PACKAGES")),
    )


def _read_consent(text: str | None) -> bool | None:
    return None if text is None else text.lower() in {"yes", "true", "1"}


def find_ca_bundle(environ: Mapping[str, str]) -> Path | None:
    """The bundle the host's own tools use: what SSL_CERT_FILE and its like name, else the distribution's file."""
    named = [environ.get(name, "") for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")]
    usual = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"]
    return next((Path(path) for path in [*named, *usual] if path and Path(path).is_file()), None)
