"""The health check for Argo CD that we ship, in a Lua of its own, beside kstatus' reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime  # the language version that Argo CD runs
from tandem_operator.observe.roles import STALLED_BY_REQUEST

FOLDER = Path(__file__).parents[2] / "examples" / "argocd"
HEALTH = (FOLDER / "health.lua").read_text()


def health(generation: int, status: dict[str, Any] | None) -> tuple[str, str]:
    lua: Any = LuaRuntime(unpack_returned_tuples=True)
    thing: dict[str, Any] = {"metadata": {"generation": generation}}
    if status is not None:
        thing["status"] = status
    found = lua.eval(f"function(obj) {HEALTH} end")(lua.table_from(thing, recursive=True))
    return found.status, found.message


def conditions(**states: str) -> dict[str, Any]:
    """`Type="True Reason"`."""
    return {
        "observedGeneration": 1,
        "conditions": [
            {"type": kind, "status": text.split()[0], "reason": text.split()[1], "message": f"about {kind}"}
            for kind, text in states.items()
        ],
    }


@pytest.mark.parametrize(
    ("generation", "status", "wanted"),
    [
        (1, None, "Progressing"),
        (1, {"observedGeneration": -1}, "Progressing"),
        (2, conditions(Ready="True AllReplicasReady"), "Progressing"),
        (1, conditions(Ready="True AllReplicasReady"), "Healthy"),
        (1, conditions(Ready="True Serving", Reconciling="True Progressing"), "Progressing"),
        (1, conditions(Ready="False Progressing", Reconciling="True Progressing"), "Progressing"),
        (1, conditions(Ready="False ImagePullFailed", Stalled="True ImagePullFailed"), "Degraded"),
        (1, conditions(Ready="True Serving", Stalled="True CrashLoopBackOff"), "Degraded"),
        *((1, conditions(Ready="False X", Stalled=f"True {reason}"), "Suspended") for reason in STALLED_BY_REQUEST),
    ],
)
def test_health(generation: int, status: dict[str, Any] | None, wanted: str) -> None:
    found, message = health(generation, status)
    assert found == wanted
    assert message


def test_the_patch_carries_the_same_script() -> None:
    data = yaml.safe_load((FOLDER / "argocd-cm.yaml").read_text())["data"]
    assert data["resource.customizations.health.tandem.dev_InferenceModel"] == HEALTH
