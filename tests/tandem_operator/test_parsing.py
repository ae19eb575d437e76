from __future__ import annotations

import pytest
from operator_objects import raw_model
from tandem_operator.errors import InvalidSpecError
from tandem_operator.parsing import parse_model, parse_status


def test_a_good_object() -> None:
    assert parse_model(raw_model()).served_name == "m"


def test_every_wrong_field_is_named() -> None:
    raw = raw_model(future=1, model={"uri": "nowhere"})
    with pytest.raises(InvalidSpecError) as caught:
        parse_model(raw)
    text = str(caught.value)
    assert "spec.model.uri: must be hf://" in text
    assert "spec.future: " in text


def test_a_status_that_cannot_be_read_is_written_anew() -> None:
    raw = raw_model() | {"status": {"conditions": "none"}}
    assert parse_status(raw).conditions == []
    assert parse_model(raw).status.observed_generation == -1
