"""What a podTemplate leaves out of the confinement of a pod and its main container is there all the same."""

from __future__ import annotations

from typing import Any

import pytest
from operator_objects import blueprint, children
from tandem_operator.objects.errors import InvalidOverlayError
from tandem_operator.objects.manifests import ChildKey, Manifest
from tandem_operator.workloads import build_children

DECODE, GATEWAY = ChildKey("StatefulSet", "m-decode"), ChildKey("Deployment", "m")
CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
MINE = {"name": "worker", "image": "mine:1"}


def pod_spec(spec: Manifest, *, key: ChildKey = DECODE) -> Manifest:
    role = {"podTemplate": {"spec": spec}}
    plan = blueprint(gateway=role) if key == GATEWAY else blueprint(decode=role)
    return children(plan)[key]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "containers",
    [
        [MINE | {"$patch": "replace"}],
        [{"$patch": "replace"}, MINE],
        [MINE | {"securityContext": None}],
        [MINE | {"securityContext": {"$patch": "delete"}}],
        [MINE | {"securityContext": {"$patch": "replace", "runAsUser": 7}}],
        [MINE | {"securityContext": {"capabilities": None, "readOnlyRootFilesystem": None}}],
    ],
)
def test_the_main_container_stays_confined(containers: list[Manifest]) -> None:
    (worker,) = pod_spec({"containers": containers})["containers"]
    assert worker["image"] == "mine:1"
    assert {key: worker["securityContext"].get(key) for key in CONFINED} == CONFINED


@pytest.mark.parametrize("patch", [{"$patch": "replace", "image": "mine:1"}, {"securityContext": None}])
def test_the_holder_of_a_store_does_too(patch: Manifest) -> None:
    spec = {"initContainers": [{"name": "store"} | patch, {"name": "first", "image": "b"}]}
    plan = blueprint(kv={"store": {"memory": "1Gi"}}, decode={"podTemplate": {"spec": spec}})
    found = {each["name"]: each for each in children(plan)[DECODE]["spec"]["template"]["spec"]["initContainers"]}
    assert found["store"]["securityContext"] == CONFINED
    assert found["first"] == {"name": "first", "image": "b"}


def test_the_gateway_does_too() -> None:
    spec = pod_spec({"containers": [{"name": "gateway", "image": "g:1", "$patch": "replace"}]}, key=GATEWAY)
    assert spec["containers"][0]["securityContext"] == CONFINED


@pytest.mark.parametrize(
    "context", [None, {"$patch": "replace", "fsGroup": 7}, {"runAsNonRoot": None, "seccompProfile": None}]
)
def test_the_pod_stays_confined(context: Any) -> None:
    found = pod_spec({"securityContext": context})["securityContext"]
    assert (found["runAsNonRoot"], found["seccompProfile"]) == (True, {"type": "RuntimeDefault"})


def test_what_is_said_stays_and_sidecars_are_peoples_own() -> None:
    own = {"runAsUser": None, "fsGroup": None, "runAsNonRoot": False}
    told = [{"name": "worker", "securityContext": {"readOnlyRootFilesystem": False}}, {"name": "beside", "image": "b"}]
    spec = pod_spec({"securityContext": own, "containers": told})
    assert (spec["securityContext"]["runAsNonRoot"], "runAsUser" in spec["securityContext"]) == (False, False)
    assert spec["containers"][0]["securityContext"] == CONFINED | {"readOnlyRootFilesystem": False}
    assert spec["containers"][1] == {"name": "beside", "image": "b"}


@pytest.mark.parametrize("containers", [[{"name": "worker", "$patch": "delete"}], [{"$patch": "replace"}]])
def test_a_pod_without_its_main_container_is_refused(containers: list[Manifest]) -> None:
    with pytest.raises(InvalidOverlayError, match=r"spec\.decode\.podTemplate\.spec\.containers must keep worker"):
        build_children(blueprint(decode={"podTemplate": {"spec": {"containers": containers}}}))
