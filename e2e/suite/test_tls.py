"""Clients over TLS: a certificate that is missing, is there, and changes under them."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from e2e.suite.fleet import Fleet, Say, smollm2, until

MODEL = "secure"
SECRET = "secure-tls"


def put_certificate(fleet: Fleet, folder: Path, name: str) -> None:
    """A fresh certificate of this name, in the Secret."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{MODEL}.example.com",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    fleet.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": SECRET},
            "stringData": {"tls.crt": certificate.read_text(), "tls.key": key.read_text()},
        }
    )


@pytest.mark.timeout(1200)
def test_a_certificate_is_missing_then_there_then_another(fleet: Fleet, say: Say, tmp_path: Path) -> None:
    fleet.apply(smollm2(MODEL, prefill=None, decode=1, gateway={"tls": {"secretName": SECRET}}))

    def told() -> bool:
        condition = fleet.condition(MODEL, "Stalled")
        assert condition is not None
        assert condition["reason"] == "TLSSecretNotFound", condition
        return SECRET in condition["message"]

    until("the missing Secret is told", told, within=180)
    put_certificate(fleet, tmp_path, "first")
    live = fleet.wait_ready(MODEL, within=300)
    assert live["status"]["url"].startswith("https://")
    pods = {pod["metadata"]["uid"] for pod in fleet.pods(MODEL)}

    with fleet.cluster.service_url(fleet.namespace, MODEL, 443) as url:
        address = urlsplit(url).netloc

        def ask(name: str) -> int:
            context = ssl.create_default_context(cafile=tmp_path / f"{name}.crt")
            body = {"model": MODEL, "prompt": "the sea is", "max_tokens": 4}
            with httpx.Client(verify=context, timeout=120) as client:
                answer = client.post(
                    f"https://{address}/v1/completions",
                    json=body,
                    headers={"host": f"{MODEL}.example.com"},
                    extensions={"sni_hostname": f"{MODEL}.example.com"},
                )
            return answer.status_code

        assert ask("first") == 200
        assert httpx.get(f"http://{address}/v1/models", timeout=120).json()["error"]["code"] == "tls_required"
        put_certificate(fleet, tmp_path, "second")
        until("clients are shown the new certificate", lambda: ask("second") == 200, within=240, every=2)
    assert {pod["metadata"]["uid"] for pod in fleet.pods(MODEL)} == pods, "nothing restarts"
    say("the new certificate is shown, and no pod was restarted")
