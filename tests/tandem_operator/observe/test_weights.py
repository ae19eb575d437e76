from __future__ import annotations

import pytest
from tandem_api.telemetry import WeightsTelemetry
from tandem_operator.observe.weights import describe_forms

ASKED = WeightsTelemetry(form="lossless", why="as engine.weights says")
LACKS = WeightsTelemetry(form="plain", why="this CPU has no AVX-512 VBMI")


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ([], None),
        ([ASKED, ASKED], "lossless: as engine.weights says"),
        ([WeightsTelemetry(form="plain")], "plain"),
        (
            [LACKS, ASKED, ASKED],
            "lossless: as engine.weights says (2 workers); plain: this CPU has no AVX-512 VBMI (1 workers)",
        ),
        (
            [WeightsTelemetry(form="plain", why=f"cause {number}") for number in range(5)],
            "plain: cause 0 (1 workers); plain: cause 1 (1 workers); plain: cause 2 (1 workers); others (2 workers)",
        ),
    ],
)
def test_forms_of_a_role(told: list[WeightsTelemetry], text: str | None) -> None:
    assert describe_forms(told) == text
    assert describe_forms(reversed(told)) == text
