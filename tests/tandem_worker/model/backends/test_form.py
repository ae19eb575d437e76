"""Which form matrices get, and why."""

from __future__ import annotations

import pytest
from tandem_api.launch import ModelSource, SchedulerConfig, WorkerConfig
from tandem_api.names import Role
from tandem_worker.host.errors import StartupError
from tandem_worker.model.backends.form import CPU_RATIOS, Footprint, FormChoice, Rows, choose_form, rows_of

RATIOS = {1: 1.2, 4: 1.1, 8: 1.0, 32: 1.05, 128: 0.97, 512: 1.01}


@pytest.mark.parametrize(
    ("rows", "form"),
    [
        (Rows(1, 1), "lossless"),
        (Rows(1, 8), "lossless"),
        (Rows(1, 32), "lossless"),
        (Rows(1, 33), "plain"),  # the next that was measured is slower
        (Rows(32, 512), "plain"),
        (Rows(512, 512), "lossless"),
        (Rows(200, 512), "plain"),  # so is the one before
        (Rows(1, 513), "plain"),  # beyond what was measured
    ],
)
def test_auto_follows_what_was_measured_at_the_roles_sizes(rows: Rows, form: str) -> None:
    assert choose_form("Auto", rows, None, RATIOS).form == form


def test_the_reason_names_what_decided() -> None:
    assert "at least 1.00 times as fast" in choose_form("Auto", Rows(1, 8), None, RATIOS).why
    assert "at 128 rows" in choose_form("Auto", Rows(1, 64), None, RATIOS).why
    assert "not been measured" in choose_form("Auto", Rows(1, 8), None, {}).why
    assert choose_form("Auto", Rows(1, 8), "No VBMI.", RATIOS) == FormChoice("plain", "No VBMI")


@pytest.mark.parametrize("ratios", [{}, RATIOS, {1: 0.5}])
def test_what_is_asked_for_is_done(ratios: dict[int, float]) -> None:
    assert choose_form("Plain", Rows(1, 1), None, ratios).form == "plain"
    assert choose_form("Lossless", Rows(1, 1), None, ratios).form == "lossless"
    with pytest.raises(StartupError, match=r"No VBMI\. Choose engine\.weights") as caught:
        choose_form("Lossless", Rows(1, 1), "No VBMI.", ratios)
    assert caught.value.reason == "WeightsFormUnsupported"


@pytest.mark.parametrize(("weights", "form"), [(99, "plain"), (100, "plain"), (101, "lossless")])
def test_what_stays_in_the_caches_is_plain_unless_a_person_says_so(weights: int, form: str) -> None:
    footprint = Footprint(weights, caches=100)
    choice = choose_form("Auto", Rows(1, 1), None, RATIOS, footprint)
    assert choice.form == form
    assert ("caches" in choice.why) == (form == "plain")
    assert choose_form("Lossless", Rows(1, 1), None, RATIOS, footprint).form == "lossless"


@pytest.mark.parametrize("role", list(Role))
def test_the_table_covers_what_roles_compute_by_default(role: Role) -> None:
    rows = rows_of(config_of(role))
    assert choose_form("Auto", rows, None, CPU_RATIOS).form == "lossless"
    assert min(CPU_RATIOS.values()) >= 0.97


def config_of(role: Role, limits: SchedulerConfig | None = None) -> WorkerConfig:
    return WorkerConfig(
        model_name="m", served_name="m", role=role, revision="r", model=ModelSource(uri="file:///m"),
        scheduler=limits or SchedulerConfig(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("role", "rows"), [(Role.DECODE, Rows(1, 256)), (Role.PREFILL, Rows(32, 2048)), (Role.UNIFIED, Rows(1, 2048))]
)
def test_rows_are_those_of_the_role(role: Role, rows: Rows) -> None:
    assert rows_of(config_of(role)) == rows


def test_steps_beyond_what_was_measured_stay_plain() -> None:
    rows = rows_of(config_of(Role.UNIFIED, SchedulerConfig(max_batch_tokens=2 * max(CPU_RATIOS))))
    assert choose_form("Auto", rows, None, CPU_RATIOS) == FormChoice(
        "plain", "12 bits have not been measured at its batch sizes"
    )
