from __future__ import annotations

import pytest
from tandem_operator.objects.errors import SettingsError
from tandem_operator.process.settings import parse_settings

IMAGES = ["--worker-image=w", "--gateway-image=g", "--gateway-cluster-role=gateways"]


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


def test_when_the_hub_is_asked() -> None:
    plain = parse_settings([*IMAGES, "--lease-namespace=ns"])
    assert (plain.hub.resolve, plain.hub.poll_seconds) == (True, 600.0)
    told = parse_settings([*IMAGES, "--lease-namespace=ns", "--hub-resolve=false", "--hub-poll-seconds=60"])
    assert (told.hub.resolve, told.hub.poll_seconds) == (False, 60.0)


def test_keys_and_policies() -> None:
    plain = parse_settings([*IMAGES, "--lease-namespace=ns"])
    assert (plain.keys.settle_seconds, plain.keys.rotate_after_seconds) == (180.0, None)
    assert (plain.release.network.enabled, plain.release.network.egress) == (True, True)
    assert plain.release.network.api_server_ports == (443, 6443)
    told = parse_settings(
        [
            *IMAGES, "--lease-namespace=ns", "--keys-settle-seconds=90", "--keys-rotate-after=2160h",
            "--network-policies=ingress", "--api-server-port=8443", "--api-server-port=8443",
        ]
    )  # fmt: skip
    assert (told.keys.settle_seconds, told.keys.rotate_after_seconds) == (90.0, 2160 * 3600.0)
    assert (told.release.network.enabled, told.release.network.egress) == (True, False)
    assert told.release.network.api_server_ports == (8443,)


@pytest.mark.parametrize(
    "wrong",
    [
        "--keys-settle-seconds=0", "--keys-settle-seconds=nan", "--keys-settle-seconds=inf", "--keys-rotate-after=90d",
        "--network-policies=some", "--api-server-port=https", "--hub-endpoint=hub", "--hub-endpoint=http://h:99999",
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense(wrong: str) -> None:
    with pytest.raises(SystemExit):
        parse_settings([*IMAGES, "--lease-namespace=ns", wrong])


def test_rollouts_at_a_time() -> None:
    plain = [*IMAGES, "--lease-namespace=ns"]
    assert parse_settings(plain).max_concurrent_rollouts == 1
    assert parse_settings([*plain, "--max-concurrent-rollouts=3"]).max_concurrent_rollouts == 3
    with pytest.raises(SystemExit):
        parse_settings([*plain, "--max-concurrent-rollouts=-1"])
