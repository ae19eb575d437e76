"""How fast a worker is, out of observations some of which are far off."""

import random

import pytest
from tandem_gateway.scheduling.speed import MIN_SAMPLES, WINDOW, Speed


def observe(speed: Speed, chance: random.Random, count: int, *, rate: float = 8000.0, latency: float = 0.03) -> None:
    for _ in range(count):
        tokens = int(chance.lognormvariate(6.5, 1.4)) + 1
        speed.observe(tokens, latency + tokens / rate)


@pytest.mark.parametrize("seed", range(5))
def test_speed_and_latency_are_told_apart(seed: int) -> None:
    speed, chance = Speed(), random.Random(seed)
    observe(speed, chance, 60)
    for tokens in (10, 300, 1000, 5000, 40_000):
        assert speed.predict(tokens) == pytest.approx(0.03 + tokens / 8000, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_what_others_have_sent_unseen_makes_no_worker_slower(seed: int) -> None:
    """A third of the observations take far longer than what this gateway knows of would."""
    speed, chance = Speed(), random.Random(seed)
    for _ in range(100):
        tokens = chance.randint(300, 20_000)
        speed.observe(tokens, (tokens + (chance.randint(2000, 60_000) if chance.random() < 1 / 3 else 0)) / 8000)
    assert speed.value == pytest.approx(8000, rel=0.1)


def test_another_speed_is_known_within_a_window() -> None:
    speed, chance = Speed(), random.Random(1)
    observe(speed, chance, 60, latency=0.0)
    for _ in range(WINDOW):
        speed.observe(4000, 4000 / 2000)
    assert speed.value == pytest.approx(2000, rel=0.01)


def test_nothing_is_predicted_from_nothing() -> None:
    speed = Speed()
    assert speed.predict(100) is None
    for _ in range(MIN_SAMPLES - 1):
        speed.observe(1000, 1.0)
    assert speed.value == 0.0
    speed.observe(1000, 1.0)
    assert speed.predict(1000) == pytest.approx(1.0)
    speed.forget()
    assert speed.predict(100) is None
