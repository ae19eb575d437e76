"""Labels and annotations of people's own, on workloads, their pods and their Services."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from operator_objects import blueprint, children
from tandem_operator.objects.manifests import DEPLOYMENT, SERVICE, STATEFUL_SET, Manifest, annotations_of, labels_of

QUEUE = "kueue.x-k8s.io/queue-name"
_KINDS = (STATEFUL_SET.name, DEPLOYMENT.name, SERVICE.name)
_WORDS = st.dictionaries(
    st.sampled_from(["a", "b.example.com/c", QUEUE]), st.text("xyz", min_size=1, max_size=3), max_size=3
)
_METADATA = st.fixed_dictionaries({}, optional={"labels": _WORDS, "annotations": _WORDS})


def decorated(**spec: Any) -> dict[str, Manifest]:
    return {f"{k.kind}/{k.name}": child for k, child in children(blueprint(**spec)).items() if k.kind in _KINDS}


def test_a_queue_of_one_role_is_on_its_workload_pods_and_service() -> None:
    found = decorated(prefill={}, decode={"metadata": {"labels": {QUEUE: "gpus"}, "annotations": {"a": "b"}}})
    for name, child in found.items():
        expected = {QUEUE: "gpus"} if name.endswith("/m-decode") else {}
        assert {k: v for k, v in labels_of(child).items() if k == QUEUE} == expected, name
    template = found["StatefulSet/m-decode"]["spec"]["template"]
    assert (labels_of(template)[QUEUE], annotations_of(template)["a"]) == ("gpus", "b")
    assert QUEUE not in found["StatefulSet/m-decode"]["spec"]["selector"]["matchLabels"]


@given(_METADATA, _METADATA)
def test_what_a_role_says_wins_and_the_operators_own_stays(general: Manifest, own: Manifest) -> None:
    plain = decorated(prefill={})
    found = decorated(prefill={}, metadata=general, decode={"metadata": own})
    assert found.keys() == plain.keys()
    for name, child in found.items():
        more = own if name.endswith("/m-decode") else {}
        parts = [(child, plain[name])]
        if "template" in child["spec"]:
            parts.append((child["spec"]["template"], plain[name]["spec"]["template"]))
        for here, before in parts:
            labels = general.get("labels", {}) | more.get("labels", {}) | labels_of(before)
            assert labels_of(here) == labels
            wanted = general.get("annotations", {}) | more.get("annotations", {})
            assert annotations_of(here).items() >= wanted.items()
            assert annotations_of(here).keys() == annotations_of(before).keys() | wanted.keys()
        assert child["spec"].get("selector") == plain[name]["spec"].get("selector")
