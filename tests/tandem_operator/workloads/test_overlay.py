from __future__ import annotations

import copy
from typing import Any

import pytest
from tandem_operator.objects.errors import InvalidOverlayError
from tandem_operator.workloads.overlay import overlay_template

BASE: dict[str, Any] = {
    "metadata": {"labels": {"tandem.dev/model": "m"}},
    "spec": {
        "serviceAccountName": "m",
        "containers": [
            {"name": "worker", "image": "w", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    },
}


def overlaid(overlay: dict[str, Any]) -> dict[str, Any]:
    before = copy.deepcopy(BASE)
    result = overlay_template(BASE, overlay, path="spec.decode.podTemplate")
    assert before == BASE
    return result


def test_nothing_changes_nothing() -> None:
    assert overlaid({}) == BASE


def test_maps_merge_and_null_removes() -> None:
    spec = overlaid({"spec": {"nodeSelector": {"a": "b"}, "serviceAccountName": None}})["spec"]
    assert spec["nodeSelector"] == {"a": "b"}
    assert "serviceAccountName" not in spec


def test_named_lists_merge_item_by_item() -> None:
    overlay = {"spec": {"containers": [{"name": "worker", "env": [{"name": "B", "value": "3"}]}, {"name": "side"}]}}
    worker, side = overlaid(overlay)["spec"]["containers"]
    assert worker["image"] == "w"
    assert worker["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}]
    assert side == {"name": "side"}


def test_items_can_be_deleted_and_replaced() -> None:
    overlay: dict[str, Any] = {
        "spec": {
            "containers": [{"name": "worker", "env": [{"name": "A", "$patch": "delete"}]}],
            "volumes": [{"$patch": "replace", "name": "tmp", "emptyDir": {"medium": "Memory"}}],
        }
    }
    spec = overlaid(overlay)["spec"]
    assert spec["containers"][0]["env"] == [{"name": "B", "value": "2"}]
    assert spec["volumes"] == [{"name": "tmp", "emptyDir": {"medium": "Memory"}}]


def test_lists_without_a_key_are_replaced() -> None:
    assert overlaid({"spec": {"tolerations": [{"operator": "Exists"}]}})["spec"]["tolerations"] == [
        {"operator": "Exists"}
    ]


def test_an_overlay_chooses_among_what_excludes_each_other() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "scratch"}}
    assert overlaid({"spec": {"volumes": [{"name": "tmp"} | claim]}})["spec"]["volumes"] == [{"name": "tmp"} | claim]
    from_secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    overlay = {"spec": {"containers": [{"name": "worker", "env": [{"name": "A", "valueFrom": from_secret}]}]}}
    assert overlaid(overlay)["spec"]["containers"][0]["env"][0] == {"name": "A", "valueFrom": from_secret}
    base = {"spec": {"containers": [{"name": "c", "readinessProbe": {"httpGet": {"port": 1}, "periodSeconds": 2}}]}}
    probe = {"spec": {"containers": [{"name": "c", "readinessProbe": {"exec": {"command": ["true"]}}}]}}
    (container,) = overlay_template(base, probe, path="p")["spec"]["containers"]
    assert container["readinessProbe"] == {"exec": {"command": ["true"]}, "periodSeconds": 2}


def test_a_volume_of_the_same_source_merges() -> None:
    overlay = {"spec": {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]}}
    assert overlaid(overlay)["spec"]["volumes"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]


def test_maps_and_whole_lists_can_be_deleted_and_replaced() -> None:
    base = {"spec": {"securityContext": {"runAsUser": 1, "fsGroup": 2}, "volumes": [{"name": "a", "emptyDir": {}}]}}
    deleted = overlay_template(base, {"spec": {"securityContext": {"$patch": "delete"}}}, path="p")
    assert "securityContext" not in deleted["spec"]
    replaced = overlay_template(base, {"spec": {"securityContext": {"$patch": "replace", "fsGroup": 3}}}, path="p")
    assert replaced["spec"]["securityContext"] == {"fsGroup": 3}
    volumes = [{"$patch": "replace"}, {"name": "b", "emptyDir": {}}]
    assert overlay_template(base, {"spec": {"volumes": volumes}}, path="p")["spec"]["volumes"] == [volumes[1]]


def test_items_are_told_apart_by_all_their_keys() -> None:
    spread = [
        {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1},
        {"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2},
    ]
    overlay = {"spec": {"topologySpreadConstraints": spread}}
    assert overlaid(overlay)["spec"]["topologySpreadConstraints"] == spread
    base = {"spec": {"containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 80}]}]}}
    ports = [{"containerPort": 80, "protocol": "UDP"}, {"containerPort": 80, "protocol": "TCP", "hostIP": "::1"}]
    overlay = {"spec": {"containers": [{"name": "c", "ports": ports}]}}
    (container,) = overlay_template(base, overlay, path="p")["spec"]["containers"]
    assert container["ports"] == [{"name": "http"} | ports[1], ports[0]]


@pytest.mark.parametrize(
    ("overlay", "sentence"),
    [
        ({"spec": {"hostAliases": [{"ip": "::1", "$patch": "drop"}]}}, r"hostAliases\[0\]\.\$patch must be delete"),
        ({"spec": {"$retainKeys": ["a"]}}, r"spec\.\$retainKeys is not known"),
        ({"spec": {"containers": [{"image": "x"}]}}, r"podTemplate\.spec\.containers\[0\] needs `name`"),
        ({"spec": {"containers": {"name": "x"}}}, r"podTemplate\.spec\.containers must not be a map"),
        ({"spec": {"volumes": "x"}}, r"podTemplate\.spec\.volumes must be a list"),
        ({"spec": "x"}, r"podTemplate\.spec must be a map"),
        ({"metadata": {"name": "x"}}, r"metadata\.name cannot be set"),
        ({"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}, r"app\.kubernetes\.io/name is set by the operator"),
        ({"metadata": {"annotations": {"tandem.dev/config-hash": "x"}}}, r"annotations: tandem\.dev/config-hash"),
    ],
)
def test_mistakes_name_the_field(overlay: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidOverlayError, match=sentence):
        overlaid(overlay)
