"""Which lane a request goes to."""

from __future__ import annotations

from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.lane_choice import choose_lane
from tandem_worker.engine.schedule.params import SamplingParams
from tandem_worker.engine.schedule.plan import SchedulerLimits
from tandem_worker.engine.schedule.prefix_cache import extend_chain
from tandem_worker.engine.schedule.request import Request
from tandem_worker.engine.schedule.scheduler import Scheduler

ROOT = b"root"


def make_lanes(count: int) -> list[Scheduler]:
    return [Scheduler(SchedulerLimits(max_batch_tokens=64), BlockManager(64, 4)) for _ in range(count)]


def make_request(name: str, prompt: tuple[int, ...]) -> Request:
    return Request(
        id=name,
        prompt=prompt,
        sampling=SamplingParams(max_tokens=4),
        arrival=0.0,
        chain_root=ROOT,
        prompt_chain=extend_chain(ROOT, prompt, 4),
    )


def test_requests_spread_by_tokens_not_by_number() -> None:
    lanes = make_lanes(2)
    taken = []
    for name, length in (("long", 40), ("a", 8), ("b", 8), ("c", 8), ("d", 40)):
        request = make_request(name, tuple(range(ord(name[0]), ord(name[0]) + length)))
        taken.append(choose_lane(lanes, request))
        lanes[taken[-1]].add(request)
    assert taken == [0, 1, 1, 1, 1]


def test_a_known_prefix_draws_its_request_until_the_load_outweighs_it() -> None:
    lanes = make_lanes(3)
    prompt = tuple(range(24))
    known = lanes[2].blocks.allocate(6)
    lanes[2].blocks.release(known, extend_chain(ROOT, prompt, 4), 0.0)
    assert choose_lane(lanes, make_request("r", prompt)) == 2
    lanes[2].add(make_request("other", tuple(range(100, 116))))
    assert choose_lane(lanes, make_request("r", prompt)) == 2
    lanes[2].add(make_request("more", tuple(range(100, 116))))
    assert choose_lane(lanes, make_request("r", prompt)) == 0
