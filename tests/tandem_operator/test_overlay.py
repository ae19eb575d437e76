from __future__ import annotations

import copy
from typing import Any

import pytest
from tandem_operator.errors import InvalidOverlayError
from tandem_operator.overlay import overlay_template

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


@pytest.mark.parametrize(
    ("overlay", "sentence"),
    [
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
