from __future__ import annotations

import pytest
import yaml
from tandem_api.generate import ROOT, generated_files


@pytest.mark.parametrize("name", sorted(generated_files()))
def test_committed_files_are_what_the_types_say(name: str) -> None:
    assert (ROOT / name).read_text() == generated_files()[name], "run `make generate`"


def test_the_crd_stays_below_what_client_side_apply_can_annotate() -> None:
    text = generated_files()["crds/tandem.dev_inferencemodels.yaml"]
    assert len(text) < 200_000
    assert yaml.safe_load(text)["metadata"]["name"] == "inferencemodels.tandem.dev"
