from __future__ import annotations

import pytest
from tandem_operator.errors import SettingsError
from tandem_operator.settings import parse_settings

IMAGES = ["--worker-image=w", "--gateway-image=g"]


def test_arguments() -> None:
    settings = parse_settings([*IMAGES, "--lease-namespace=ns", "--namespace=a", "--namespace=b", "--namespace=a"])
    assert (settings.release.worker_image, settings.release.gateway_image) == ("w", "g")
    assert settings.namespaces == ("a", "b")
    assert settings.lease.give_up_seconds < settings.lease.duration_seconds


def test_two_processes_on_one_host_are_told_apart() -> None:
    arguments = [*IMAGES, "--lease-namespace=ns", "--identity=pod-0"]
    assert parse_settings(arguments).lease.identity != parse_settings(arguments).lease.identity


def test_the_lease_needs_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    with pytest.raises(SettingsError, match="--lease-namespace or POD_NAMESPACE"):
        parse_settings(IMAGES)
