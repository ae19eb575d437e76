"""Whoever watches InferenceModels from outside reads them right: kstatus, Argo CD's health check, and Flux at work."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from e2e.gitops import Flux, read_health
from e2e.suite.conftest import ARTIFACTS
from e2e.suite.fleet import Fleet, Say, smollm2, until

pytestmark = pytest.mark.gitops
Object = dict[str, Any]
NO_IMAGE = "registry.invalid/no-such-image:1"


def changed(manifest: Object, **spec: Any) -> Object:
    return manifest | {"spec": manifest["spec"] | spec}


def states() -> dict[str, tuple[Object, str, str]]:
    """Manifests by name, with what kstatus and Argo CD are to say of them once the operator has."""
    plain = {
        name: smollm2(name, prefill=None) for name in ("asleep", "empty", "unserved", "badly", "missing", "imageless")
    }
    engine = plain["imageless"]["spec"]["engine"]
    model = plain["missing"]["spec"]["model"]
    return {
        "asleep": (changed(plain["asleep"], suspend=True), "Failed", "Suspended"),
        "empty": (changed(plain["empty"], decode={"replicas": 0}), "Failed", "Suspended"),
        "unserved": (changed(plain["unserved"], suspend=True, gateway={"replicas": 0}), "Failed", "Suspended"),
        "badly": (
            changed(plain["badly"], suspend=True, gateway={"podTemplate": {"spec": {"containers": [{"name": ""}]}}}),
            "Failed",
            "Degraded",
        ),
        "missing": (
            changed(plain["missing"], model=model | {"uri": "hf://HuggingFaceTB/no-such-model"}), "Failed", "Degraded",
        ),
        "imageless": (changed(plain["imageless"], engine=engine | {"image": NO_IMAGE}), "Failed", "Degraded"),
    }  # fmt: skip


def test_kstatus_argo_cd_and_kubectl_agree_in_every_state(fleet: Fleet, main: Fleet, say: Say) -> None:
    wanted: dict[str, tuple[str, str]] = {"main": ("Current", "Healthy")}
    fresh = smollm2("fresh", prefill=None)
    path = fleet.path("inferencemodels") + "?dryRun=All"
    seen = {"fresh": fleet.kubernetes.request("POST", path, fresh), "main": main.get("inferencemodels", "main")}
    wanted["fresh"] = ("InProgress", "Progressing")
    fleet.apply(smollm2("starting", prefill=None))
    starting = until(
        "the first status",
        lambda: live if (live := fleet.get("inferencemodels", "starting"))["status"].get("url") else None,
        within=120,
    )
    seen["starting"], wanted["starting"] = starting, ("InProgress", "Progressing")
    for name, (manifest, kstatus, argo) in states().items():
        fleet.apply(manifest)
        wanted[name] = (kstatus, argo)
    held = smollm2("leaving", prefill=None, suspend=True)
    held["metadata"]["finalizers"] = ["e2e.tandem.dev/hold"]
    fleet.apply(held)
    fleet.delete("inferencemodels", "leaving")
    try:
        seen["leaving"], wanted["leaving"] = fleet.get("inferencemodels", "leaving"), ("Terminating", "Progressing")
    finally:
        fleet.kubernetes.request(
            "PATCH", fleet.path("inferencemodels", "leaving"), {"metadata": {"finalizers": None}},
            "application/merge-patch+json",
        )  # fmt: skip

    def settled() -> bool:
        for name in states():
            seen[name] = fleet.get("inferencemodels", name)
        found = dict(zip(seen, read_health(list(seen.values())), strict=True))
        assert {name: (v["kstatus"], v["argo"]) for name, v in found.items()} == wanted, found
        return True

    until("every state is read as it should be", settled, within=240, every=2)
    rows = json.loads(fleet.cluster.kubectl("-n", fleet.namespace, "get", "im", "-o", "json"))["items"]
    shown = fleet.cluster.kubectl("-n", fleet.namespace, "get", "im", "--no-headers").splitlines()
    columns = {line.split()[0]: line.split()[1] for line in shown}
    for row in rows:
        conditions = {c["type"]: c["status"] for c in row["status"]["conditions"]}
        assert columns[row["metadata"]["name"]] == conditions["Ready"]
    assert {columns[name] for name in states()} == {"False"}, "none of them serves"
    say(f"kstatus and Argo CD agree in {len(seen)} states: {', '.join(sorted(seen))}")


@pytest.mark.timeout(600)
def test_flux_waits_corrects_fails_fast_and_prunes(fleet: Fleet, say: Say) -> None:
    good = smollm2("synced", prefill=None)
    bad = changed(good, engine=good["spec"]["engine"] | {"image": NO_IMAGE})
    with Flux(fleet, ARTIFACTS / "kustomize-controller.log") as flux:
        revision = flux.publish(good)
        until("the model is made", lambda: fleet.exists("inferencemodels", "synced"), within=120)
        until("Flux says that it waits", lambda: flux.conditions()["Ready"]["status"] == "Unknown", within=120)

        def done() -> bool:
            before = fleet.get("inferencemodels", "synced")
            if not flux.is_done(revision):
                return False
            assert before["status"]["conditions"], before
            return True

        until("Flux is done waiting", done, within=240)
        fleet.wait_ready("synced", within=1)  # at that moment, not some time later

        generation = fleet.get("inferencemodels", "synced")["metadata"]["generation"]
        drifted_at = time.monotonic()
        fleet.patch("synced", {"decode": {"replicas": 2}})
        until(
            "the drift is taken back",
            lambda: fleet.get("inferencemodels", "synced")["spec"]["decode"]["replicas"] == 1,
            within=120,
        )
        say(f"Flux took a drift back after {time.monotonic() - drifted_at:.0f} s")
        fleet.wait_ready("synced")
        time.sleep(12)  # two intervals more: nobody writes against anybody
        assert fleet.get("inferencemodels", "synced")["metadata"]["generation"] == generation + 2

        failed_at = time.monotonic()
        flux.publish(bad)
        failed = until(
            "Flux says that the model has failed",
            lambda: ready if (ready := flux.conditions()["Ready"])["reason"] == "HealthCheckFailed" else None,
            within=240,
        )
        say(f"Flux gave up on a wrong image after {time.monotonic() - failed_at:.0f} s: {failed['message']}")
        assert "synced" in failed["message"]
        available = fleet.condition("synced", "Available")
        assert available is not None
        assert available["status"] == "True", "the pods before still serve"

        revision = flux.publish(good)
        until("Flux is ready again", lambda: flux.is_done(revision), within=240)

        revision = flux.publish({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "left"}, "data": {}})
        until("the model is pruned", lambda: not fleet.exists("inferencemodels", "synced"), within=120)
        until("its children are gone", lambda: not fleet.children("synced"), within=240)
        until("Flux is done", lambda: flux.is_done(revision), within=120)
