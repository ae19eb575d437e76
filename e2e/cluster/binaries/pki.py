"""Keys, certificates and kubeconfigs of one cluster, made anew at each start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..commands import run
from .network import Addresses

NODE = "node-0"
FRONT_PROXY = "front-proxy-client"
"""As whom the API server speaks to API servers behind it, which then believe whom it names as the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    name: str
    subject: str
    usages: str
    names: tuple[str, ...] = ()
    """Subject alternative names, e.g. `IP:10.0.0.1`."""
    authority: str = "ca"

    @property
    def extensions(self) -> str:
        lines = [f"extendedKeyUsage={self.usages}"]
        if self.names:
            lines.append(f"subjectAltName={','.join(self.names)}")
        return "\n".join(lines)


def plan_certificates(addresses: Addresses) -> list[Certificate]:
    """One certificate for each part that talks, with the identity that Kubernetes' built-in RBAC rules know."""
    api_names = tuple(f"IP:{ip}" for ip in (addresses.node, "127.0.0.1", addresses.api_service)) + tuple(
        f"DNS:{name}" for name in ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
    )
    clients = {
        "admin": "/O=system:masters/CN=admin",
        "controller-manager": "/CN=system:kube-controller-manager",
        "scheduler": "/CN=system:kube-scheduler",
        "proxy": "/CN=system:kube-proxy",
        "coredns": "/CN=system:coredns",
    }
    return [
        Certificate(name="apiserver", subject="/CN=kube-apiserver", usages="serverAuth", names=api_names),
        Certificate(
            name="kubelet",
            subject=f"/O=system:nodes/CN=system:node:{NODE}",
            usages="clientAuth,serverAuth",
            names=(f"IP:{addresses.node}", f"DNS:{NODE}"),
        ),
        *(Certificate(name=name, subject=subject, usages="clientAuth") for name, subject in clients.items()),
        # Signed by another authority: whoever has a certificate of that one may speak as anybody.
        Certificate(name=FRONT_PROXY, subject=f"/CN={FRONT_PROXY}", usages="clientAuth", authority="front-proxy-ca"),
    ]


def build_kubeconfig(pki: Path, name: str, server: str) -> str:
    """A kubeconfig (JSON is YAML) for the certificate `name`."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "tandem", "cluster": {"server": server, "certificate-authority": str(pki / "ca.crt")}}
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate": str(pki / f"{name}.crt"),
                        "client-key": str(pki / f"{name}.key"),
                    },
                }
            ],
            "contexts": [{"name": "tandem", "context": {"cluster": "tandem", "user": name}}],
            "current-context": "tandem",
        },
        indent=1,
    )


def write_pki(pki: Path, addresses: Addresses) -> None:
    """Write `<name>.crt`, `.key` and `.kubeconfig` for each certificate, the authorities, and the service-account
    key."""
    pki.mkdir(parents=True, mode=0o700)
    _write_key(pki / "sa.key")
    certificates = plan_certificates(addresses)
    for name in sorted({certificate.authority for certificate in certificates}):
        _write_key(pki / f"{name}.key")
        run("openssl", "req", "-x509", "-new", "-key", pki / f"{name}.key", "-out", pki / f"{name}.crt",
            "-days", "365", "-subj", f"/CN=tandem-{name}")  # fmt: skip
    server = f"https://{addresses.node}:6443"
    for certificate in certificates:
        _write_certificate(pki, certificate)
        (pki / f"{certificate.name}.kubeconfig").write_text(build_kubeconfig(pki, certificate.name, server))


def _write_key(path: Path) -> None:
    path.touch(mode=0o600)
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)


def _write_certificate(pki: Path, certificate: Certificate) -> None:
    key, request, extensions = (pki / f"{certificate.name}.{suffix}" for suffix in ("key", "csr", "ext"))
    _write_key(key)
    extensions.write_text(certificate.extensions)
    run("openssl", "req", "-new", "-key", key, "-out", request, "-subj", certificate.subject)
    authority = pki / certificate.authority
    run("openssl", "x509", "-req", "-in", request, "-CA", f"{authority}.crt", "-CAkey", f"{authority}.key",
        "-CAcreateserial", "-out", pki / f"{certificate.name}.crt", "-days", "365",
        "-extfile", extensions)  # fmt: skip
