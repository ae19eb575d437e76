from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_operator.children.matching import satisfies

scalars = st.integers() | st.text(max_size=5) | st.booleans()
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


@given(tree=trees)
def test_everything_satisfies_itself(tree: Any) -> None:
    assert satisfies(copy.deepcopy(tree), tree)


@pytest.mark.parametrize(
    ("live", "desired"),
    [
        ({"a": 1, "added": 2}, {"a": 1}),
        ({"a": [{"b": 1, "added": 2}]}, {"a": [{"b": 1}]}),
        ({}, {"a": {}, "b": []}),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "1000m"}}),
        ({"requests": {"memory": "1Gi", "cpu": "1"}}, {"requests": {"memory": "1024Mi"}}),
        ({"limits": {"cpu": "1m"}}, {"limits": {"cpu": "0.0001"}}),
        ({"overhead": {"cpu": "1"}}, {"overhead": {"cpu": "1000m"}}),
        ({"dnsPolicy": "ClusterFirst"}, {"dnsPolicy": ""}),
        ({"limits": {"memory": "9223372036854775807"}}, {"limits": {"memory": "100E"}}),
        ({"emptyDir": {"sizeLimit": "2Gi"}}, {"emptyDir": {"sizeLimit": "2048Mi"}}),
        ({"emptyDir": {"sizeLimit": "512Mi"}}, {"emptyDir": {"sizeLimit": "0.5Gi"}}),
        ({"env": [{"name": "PROXY"}]}, {"env": [{"name": "PROXY", "value": ""}]}),
        ({"volumeMounts": [{"name": "a"}]}, {"volumeMounts": [{"name": "a", "readOnly": False}]}),
        ({}, {"hostNetwork": False}),
        ({"periodSeconds": 10}, {"initialDelaySeconds": 0, "periodSeconds": 0}),
    ],
)
def test_additions_and_rewritten_quantities_are_fine(live: Any, desired: Any) -> None:
    assert satisfies(live, desired)


@pytest.mark.parametrize(
    ("live", "desired"),
    [
        ({}, {"a": 1}),
        ({"a": 2}, {"a": 1}),
        ({"a": 1}, {"a": True}),
        ({"a": [1, 2]}, {"a": [1]}),
        ({"a": [{"b": 1}, {"c": 1}]}, {"a": [{"b": 1}]}),
        ({"limits": {"cpu": "2"}}, {"limits": {"cpu": "1"}}),
        ({"limits": {}}, {"limits": {"cpu": "1"}}),
        ({"a": {}}, {"a": {"b": 0}}),
        ({"emptyDir": {"sizeLimit": "1Gi"}}, {"emptyDir": {"sizeLimit": "2Gi"}}),
        ({"emptyDir": {}}, {"emptyDir": {"sizeLimit": "2Gi"}}),
        ({"env": [{"name": "PROXY", "value": "http://p"}]}, {"env": [{"name": "PROXY", "value": ""}]}),
        ({"readOnly": True}, {"readOnly": False}),
        ({}, {"automountServiceAccountToken": False}),
        ({"periodSeconds": 5}, {"periodSeconds": 0}),
    ],
)
def test_drift_is_seen(live: Any, desired: Any) -> None:
    assert not satisfies(live, desired)
