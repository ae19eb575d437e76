"""What goes wrong ends in a condition that names the cause, and a fixed manifest recovers by itself."""

from __future__ import annotations

import base64
from typing import Any

from e2e.suite.fleet import Fleet, Say, smollm2, until

PRIVATE = "hf://tandem-e2e/private-smollm2"  # the mirror asks for a token
TOKEN = "tandem-e2e-token"


def cause(fleet: Fleet, model: str, *fragments: str) -> dict[str, Any] | None:
    """The condition that is not fine and whose reason or message has every fragment."""
    for condition in fleet.get("inferencemodels", model).get("status", {}).get("conditions", []):
        text = f"{condition['reason']} {condition['message']}".lower()
        if condition["type"] != "Ready" and all(fragment.lower() in text for fragment in fragments):
            return condition
    return None


def test_wrong_image_then_missing_model(fleet: Fleet, say: Say) -> None:
    """One object through two mistakes to a running model, never deleted."""
    manifest = smollm2("mistaken", prefill=None)
    manifest["spec"]["engine"]["image"] = "registry.invalid/no-such-image:1"
    fleet.apply(manifest)
    seen = until("the image to be named", lambda: cause(fleet, "mistaken", "no-such-image"), within=120)
    say(f"wrong image: {seen['type']} {seen['reason']}: {seen['message']}")

    del manifest["spec"]["engine"]["image"]
    manifest["spec"]["model"]["uri"] = "hf://HuggingFaceTB/no-such-model"
    fleet.apply(manifest)
    seen = until(
        "the model to be named", lambda: cause(fleet, "mistaken", "ModelNotFound", "no-such-model"), within=120
    )
    say(f"missing model: {seen['type']} {seen['reason']}: {seen['message']}")

    fleet.apply(smollm2("mistaken", prefill=None))
    fleet.wait_ready("mistaken")
    assert fleet.condition("mistaken", "Stalled") is None


def test_missing_secret_then_wrong_token(fleet: Fleet, say: Say) -> None:
    manifest = smollm2("secretive", prefill=None)
    manifest["spec"]["model"] |= {"uri": PRIVATE, "secretRef": {"name": "hub-token"}}
    fleet.apply(manifest)
    seen = until("the Secret to be named", lambda: cause(fleet, "secretive", "hub-token"), within=120)
    say(f"missing Secret: {seen['type']} {seen['reason']}: {seen['message']}")
    fleet.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "hub-token"},
            "data": {"token": base64.b64encode(TOKEN.encode()).decode()},
        }
    )
    fleet.wait_ready("secretive")


def test_name_taken_by_somebody_else(fleet: Fleet) -> None:
    """A child's name that belongs to another is not stolen."""
    service = {"metadata": {"name": "taken"}, "spec": {"ports": [{"port": 80}], "selector": {"app": "other"}}}
    fleet.kubernetes.request("POST", fleet.path("services"), service)
    fleet.apply(smollm2("taken", prefill=None, suspend=True))
    seen = until("the clash to be named", lambda: cause(fleet, "taken", "service", "taken"), within=60)
    assert seen["type"] == "Stalled"
    assert fleet.get("services", "taken")["spec"]["selector"] == {"app": "other"}
    fleet.delete("services", "taken")
    until("the name to be used", lambda: "tandem.dev/model" in str(fleet.get("services", "taken")), within=60)
