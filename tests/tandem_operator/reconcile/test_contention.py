"""What is written again and again is written ever more rarely, and the other writer is named."""

from __future__ import annotations

import pytest
from tandem_operator.objects.manifests import ChildKey, Manifest, ModelKey
from tandem_operator.reconcile.contention import FREE, Contention, last_writer

MODEL, SET = ModelKey("space", "m"), ChildKey("StatefulSet", "m-decode")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fight(contention: Contention, clock: Clock, *, seconds: float, content: str = "ours") -> list[float]:
    """When it is written, where somebody writes something else every half a second."""
    began, times = clock.now, list[float]()
    while clock.now < began + seconds:
        if not contention.wait(MODEL, SET, content):
            contention.note(MODEL, SET, content, writer="the manager other")
            times.append(clock.now - began)
        clock.now += 0.5
    return times


def test_a_fight_becomes_rarer_and_is_told() -> None:
    clock = Clock()
    contention = Contention(clock)
    times = fight(contention, clock, seconds=3600)
    assert times[: FREE + 1] == [0.0, 0.5, 1.0, 1.5]
    minutes = [sum(60 * m <= t < 60 * (m + 1) for t in times) for m in range(60)]
    assert (max(minutes), minutes[-1] <= 1, len(times) <= 24) == (minutes[0], True, True)
    assert minutes[0] <= 8
    (said,) = contention.condition(MODEL)
    assert (said.type, said.reason) == ("Contested", "OtherWriter")
    assert "StatefulSet m-decode (the manager other)" in said.message


def test_a_rollout_is_no_fight_and_a_fight_ends() -> None:
    clock = Clock()
    contention = Contention(clock)
    for step in range(50):
        assert contention.wait(MODEL, SET, f"partition {step}") == 0
        contention.note(MODEL, SET, f"partition {step}")
    assert contention.condition(MODEL) == []
    fight(contention, clock, seconds=60)
    assert contention.wait(MODEL, SET, "ours") > 0
    assert contention.wait(MODEL, SET, "what the spec says now") == 0, "another wish is followed at once"
    clock.now += 1000
    assert (contention.wait(MODEL, SET, "ours"), contention.condition(MODEL)) == (0.0, [])
    fight(contention, clock, seconds=60)
    contention.forget(MODEL)
    assert (contention.wait(MODEL, SET, "ours"), contention.condition(MODEL)) == (0.0, [])


def test_what_the_operator_itself_wants_now_one_way_and_now_the_other_is_no_fight() -> None:
    """A model that sleeps and wakes, replicas that follow a load: each is another wish than the one before."""
    clock = Clock()
    contention = Contention(clock)
    for step in range(50):
        wish = f"{2 + step % 2} replicas"
        assert contention.wait(MODEL, SET, wish) == 0
        contention.note(MODEL, SET, wish)
        assert not contention.is_contested(MODEL, SET)
        clock.now += 60
    assert contention.condition(MODEL) == []
    fight(contention, clock, seconds=60)
    assert contention.condition(MODEL), "the same again and again is one"


def entry(manager: str, second: int, subresource: str = "") -> Manifest:
    return {"manager": manager, "time": f"2026-01-01T00:00:{second:02}Z", "subresource": subresource}


@pytest.mark.parametrize(
    ("entries", "writer"),
    [
        ([entry("kubectl", 10), entry("tandem-operator", 10)], "the manager kubectl"),
        ([entry("kubectl", 1), entry("tandem-operator", 50)], "another operator of Tandem, as tandem-operator"),
        ([entry("helm", 2), entry("argocd", 9), entry("tandem-operator", 5)], "the manager argocd"),
        ([entry("kube-controller-manager", 9, "status"), entry("tandem-operator", 5)],
         "another operator of Tandem, as tandem-operator"),
        ([], ""),
    ],
)  # fmt: skip
def test_the_last_writer_is_named(entries: list[Manifest], writer: str) -> None:
    assert last_writer({"metadata": {"managedFields": entries}}) == writer
    assert last_writer(None) == "something deletes it"
