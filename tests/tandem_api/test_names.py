from __future__ import annotations

import pytest
from tandem_api.names import pod_ordinal


@pytest.mark.parametrize(("pod", "ordinal"), [("m-decode-0", 0), ("m-decode-17", 17), ("a-1-2", 2)])
def test_ordinals_end_the_name(pod: str, ordinal: int) -> None:
    assert pod_ordinal(pod) == ordinal


@pytest.mark.parametrize("pod", ["", "m", "m-decode", "7", "m-decode-", "m-decode-²"])
def test_other_names_have_none(pod: str) -> None:
    with pytest.raises(ValueError, match="not the name of a StatefulSet's pod"):
        pod_ordinal(pod)
