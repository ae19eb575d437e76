"""Whether a look-up is worth the wait, by what it may save and how often nothing was found; and look-ups together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.tiers import LoadOrder
from tandem_worker.tiers.mooncake.asking import EXPLORE, LONGEST_ODDS, Odds
from tandem_worker.tiers.mooncake.objects import MOST_NAMES

from tests.mooncake.processes import Program, run_store
from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.mooncake.rig import StoreRig
from tests.tandem_worker.tiers.mooncake.test_tier import make_prompt
from tests.tandem_worker.tiers.rig import wait_until


def make_odds(in_vain: int, seconds: float) -> Odds:
    odds = Odds()
    odds.note_seconds(seconds)
    for _ in range(in_vain):
        odds.note_answer(found=False)
    return odds


@pytest.mark.parametrize(
    ("in_vain", "blocks", "seconds_per_block", "favoured"),
    [
        (0, 1, 0.005, True),  # 5 ms to be saved, for 2
        (0, 1, 0.001, False),
        (0, 1, None, True),
        (9, 1, 0.005, False),
        (9, 5, 0.005, True),
        (1000, 25, 0.005, False),
        (1000, 26, 0.005, True),  # 1,000 count as 63
    ],
)
def test_it_is_asked_where_what_it_may_save_is_likely_to_be_more(
    in_vain: int, blocks: int, seconds_per_block: float | None, favoured: bool
) -> None:
    assert make_odds(in_vain, 0.002).favour(blocks, seconds_per_block, 1.0) is favoured


def test_a_find_makes_the_next_one_sure() -> None:
    odds = make_odds(LONGEST_ODDS, 0.002)
    assert not odds.favour(1, 0.005, 1.0)
    odds.note_answer(found=True)
    assert odds.favour(1, 0.005, 1.0)


def test_some_in_vain_in_a_row_say_little_of_a_store_that_has_three_prompts_of_ten() -> None:
    """A look-up takes 10 ms, and saves 100 where it finds something, which is three times what it takes."""
    odds = make_odds(0, 0.01)
    for number in range(200):
        odds.note_answer(found=number % 10 in (0, 3, 6))
    for _ in range(12):
        odds.note_answer(found=False)
        assert odds.favour(1, 0.1, 1.0)
    for _ in range(100):
        odds.note_answer(found=False)
    assert not odds.favour(1, 0.1, 1.0)


def test_one_in_some_is_made_all_the_same() -> None:
    odds = make_odds(LONGEST_ODDS, 0.002)
    assert [odds.favour(1, 0.005, 1.0) for _ in range(2 * EXPLORE)] == ([False] * (EXPLORE - 1) + [True]) * 2


def test_one_that_took_long_does_not_keep_others_from_asking() -> None:
    """A request would not wait for it: it is cut."""
    odds = make_odds(3, 5.0)
    assert odds.favour(10, 0.005, 0.012)
    assert not odds.favour(10, 0.005, 0.013)


def test_before_any_was_made_everything_is_asked() -> None:
    assert Odds().favour(1, 1e-9, 1.0)


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 300), st.floats(1e-4, 1e-1))
def test_no_more_is_lost_than_the_asking_would_cost(answers: list[bool], blocks: int, per_block: float) -> None:
    """Whatever came before: what is passed over would have saved no more than 64 look-ups take."""
    odds = make_odds(0, 0.002)
    for found in answers:
        odds.note_answer(found=found)
    if not odds.favour(blocks, per_block, 1.0):
        assert blocks * per_block <= (LONGEST_ODDS + 1) * odds.seconds
        assert not answers or not answers[-1] or blocks * per_block <= odds.seconds


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_store(tmp_path_factory.mktemp("mooncake")) as (_, holder):
        holder: Program
        yield holder.address


def count_asks(rig: StoreRig) -> list[int]:
    """Names of each look-up that is made from now on."""
    made: list[int] = []
    call = rig.tier._client.call

    def counted(kind: str, *arguments: object, **options: object) -> object:
        if kind == "exist":
            made.append(len(arguments[0]))  # type: ignore[arg-type]
        return call(kind, *arguments, **options)  # type: ignore[arg-type]

    rig.tier._client.call = counted  # type: ignore[method-assign,assignment]
    return made


def test_prompts_that_nobody_has_are_asked_for_less_and_less_until_one_is_found(address: str) -> None:
    """A prompt takes 40 s to compute, and a request waits for 2 s: after 19 in vain none is worth it."""
    first, second = StoreRig(address), StoreRig(address, num_blocks=400)
    made = count_asks(second)
    second.tier._odds.seconds, second.tier._odds.in_vain = 10.0, 16
    second.tier._odds.note_seconds = lambda seconds: None  # type: ignore[method-assign]
    for number in range(3 + EXPLORE - 2):
        prompt = make_prompt(900 + number)
        assert second.run(f"a{number}", prompt) == greedy_answer(prompt, 8)
    assert len(made) == 3, "and chance comes with the next but one"
    prompts = [make_prompt(950), make_prompt(951), make_prompt(952)]
    for number, prompt in enumerate(prompts):
        first.run(f"b{number}", prompt)
    wait_until(lambda: first.written == 36)
    for number, prompt in enumerate(prompts):
        assert second.run(f"c{number}", prompt) == greedy_answer(prompt, 8)
    assert [second.cached(f"c{number}") for number in range(3)] == [0, 40, 40]
    first.close()
    second.close()


def test_what_is_known_to_be_there_is_loaded_without_a_look_up_for_the_rest(address: str) -> None:
    prompt = make_prompt(960, 61)
    rig = StoreRig(address, num_blocks=32)
    rig.run("a", prompt[:41])
    wait_until(lambda: rig.written >= 10)
    for seed in range(970, 974):
        rig.run(f"other{seed}", make_prompt(seed))  # memory gives the beginning up
    made = count_asks(rig)
    rig.tier._odds.seconds, rig.tier._odds.in_vain = 10.0, LONGEST_ODDS
    assert rig.run("b", prompt) == greedy_answer(prompt, 8)
    assert (rig.cached("b"), made) == (40, [])
    rig.close()


def test_look_ups_that_wait_are_made_together(address: str) -> None:
    rig = StoreRig(address, usable=False)
    tier = rig.tier
    orders = [
        LoadOrder(load=load, names=(), block_ids=(), seconds_per_block=1.0, asks=(bytes([load]) * 16,) * count)
        for load, count in enumerate((1, 100, MOST_NAMES - 101, 1, 1000, 2))
    ]
    rig.close()  # the threads have gone: nobody else takes them
    for order in orders[1:]:
        tier._asks.put(order)
    while tier._asks.empty():
        pass
    taken, last = tier._take_waiting(orders[0])
    assert ([order.load for order in taken], last) == ([0, 1, 2], orders[3])
    taken, last = tier._take_waiting(orders[3])
    assert ([order.load for order in taken], last) == ([3], orders[4])
    tier._asks.put(None)
    taken, last = tier._take_waiting(orders[4])
    assert ([order.load for order in taken], last) == ([4], orders[5])
    taken, last = tier._take_waiting(orders[5])
    assert ([order.load for order in taken], last) == ([5], None)
    assert tier._asks.get() is None, "the thread ends after these"


@pytest.mark.parametrize("count", [20, 200])
@pytest.mark.parametrize(("found", "in_vain"), [(True, 0), (False, 1)])
def test_of_many_that_ask_for_the_same_one_look_up_is_made_and_counted(
    address: str, found: bool, in_vain: int, count: int
) -> None:
    """Many send the same prompt at once, so short that one call takes them all, or not: where the store has it, it
    stays worth being asked, and where not, it was in vain once."""
    rig = StoreRig(address, usable=False)
    tier, names = rig.tier, tuple(bytes([number]) * 16 for number in range(count))
    rig.close()  # the threads have gone: nobody else takes them
    made: list[int] = []

    def find(asked: Sequence[bytes]) -> None:
        made.append(len(asked))
        (tier._slots._note if found else tier._slots.note_absent)(asked)

    tier._slots.ask = find  # type: ignore[method-assign]
    for load in range(8):
        order = LoadOrder(load=load, names=(), block_ids=(), seconds_per_block=1.0, asks=names)
        tier._asking[load] = order, float("inf")
        tier._asks.put(order)
    tier._asks.put(None)
    tier._run_asks()
    assert (made, tier._odds.in_vain, tier._asking) == ([count], in_vain, {})


def test_what_is_known_to_be_there_is_loaded_where_a_look_up_for_the_rest_is_late(address: str) -> None:
    rig = StoreRig(address, usable=False)
    tier, names = rig.tier, tuple(bytes([number]) * 16 for number in range(8))
    rig.close()
    tier._slots._note(names[:5])
    tier._asking[1] = LoadOrder(load=1, names=(), block_ids=(), seconds_per_block=1.0, asks=names), 0.0
    tier._cut_late_asks()
    assert (tier._asking, tier.stats().loads_cut, tier._slots.count_known(names)) == ({}, 1, 5)
