"""Agents made up: closed loops of tool calls under the system prompts of a few applications, with helpers of their own.

A turn comes when what was before it has ended: the answer, the tools that it called, the helpers that it sent. So a
slow fleet is asked less, as agents do, and what is measured is how long they wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from tandem_sim.traces import BLOCK_TOKENS, Arrival

APPLICATIONS = 24
"""Number of applications: the first is asked most, the n-th a share of 1/n of it."""
SYSTEM_BLOCKS = (6, 28)
"""Fewest and most blocks of an application's own prompt: instructions and tools."""
HELPER_BLOCKS = (3, 10)
"""Fewest and most blocks of the prompt of an application's helpers, which have another one."""
MAX_CONTEXT = 60_000
"""Tokens, after which an agent begins a new conversation."""
_HELPERS = 0.06
"""Share of the turns that send helpers."""


@dataclass(slots=True)
class Turn:
    """One request."""

    conversation: int
    prompt: int
    output: int
    """Tokens."""
    blocks: tuple[int, ...]
    pause: float
    """Seconds between the end of what was before it and this turn: tools that run, or somebody who reads."""
    helpers: list[list[Turn]] = field(default_factory=list["list[Turn]"])
    """Loops that begin with the end of this turn's answer. The next turn waits for all of them."""


class _Loop:
    """Turns of one agent or helper, one after another."""

    __slots__ = ("busy", "next", "parent", "turns", "until")

    def __init__(self, turns: Iterator[Turn], parent: _Loop | None) -> None:
        self.turns = turns
        self.next: Turn | None = next(turns, None)
        self.parent = parent
        self.busy = 0
        """Helpers that have not ended, and the answer."""
        self.until = 0.0
        """When the last of these has."""


class Agents:
    """So many agents at once, each with one conversation after another, until so many requests were made.

    The same seed gives the same conversations; when their turns come is for whoever serves them.
    """

    def __init__(self, agents: int, *, requests: int, ramp: float = 30.0, seed: int = 1) -> None:
        """`ramp`: seconds within which they begin, evenly."""
        self.total = self._left = requests
        self._blocks = count(1)
        self._conversations = count(1)
        self._order = count()
        self._running: dict[int, _Loop] = {}
        self._due: list[tuple[float, int, _Loop]] = []
        chance, take = random.Random(seed), self._take_blocks
        self._systems = [
            (take(chance.randint(*SYSTEM_BLOCKS)), take(chance.randint(*HELPER_BLOCKS))) for _ in range(APPLICATIONS)
        ]
        self._weights = [1 / (number + 1) for number in range(APPLICATIONS)]
        for number in range(agents):
            self._begin(self._work(f"{seed}/{number}"), ramp * number / agents, None)

    @property
    def next_at(self) -> float:
        """When the next request comes; infinite: all were made, or those to come wait for answers."""
        return self._due[0][0] if self._due and self._left else inf

    def pop(self) -> Arrival:
        self._left -= 1
        at, _, loop = heappop(self._due)
        turn = loop.next
        assert turn is not None
        self._running[turn.conversation] = loop
        return Arrival(at, turn.prompt, turn.output, turn.blocks, turn.conversation)

    def end(self, session: int, at: float) -> None:
        """The answer of a conversation has ended then."""
        loop = self._running.pop(session)
        turn = loop.next
        assert turn is not None
        loop.busy, loop.until = len(turn.helpers), at
        for helper in turn.helpers:
            self._begin(iter(helper), at, loop)
        if not loop.busy:
            self._go_on(loop)

    def _begin(self, turns: Iterator[Turn], at: float, parent: _Loop | None) -> None:
        loop = _Loop(turns, parent)
        assert loop.next is not None
        heappush(self._due, (at + loop.next.pause, next(self._order), loop))

    def _go_on(self, loop: _Loop) -> None:
        loop.next = next(loop.turns, None)
        if loop.next is not None:
            heappush(self._due, (loop.until + loop.next.pause, next(self._order), loop))
        elif (parent := loop.parent) is not None:
            parent.busy -= 1
            parent.until = max(parent.until, loop.until)
            if not parent.busy:
                self._go_on(parent)

    def _take_blocks(self, number: int) -> tuple[int, ...]:
        return tuple(next(self._blocks) for _ in range(number))

    def _work(self, name: str) -> Iterator[Turn]:
        """What one agent does, conversation after conversation."""
        chance = random.Random(name)  # its own: what it asks does not hang on whose turn comes first
        while True:
            yield from self._converse(chance)

    def _converse(self, chance: random.Random) -> Iterator[Turn]:
        """About several tasks, each a loop of tool calls."""
        system, helper = chance.choices(self._systems, self._weights)[0]
        context, conversation = _Context(system, self._take_blocks), next(self._conversations)
        pause = 0.0
        while context.tokens < MAX_CONTEXT:
            context.add(min(8000, chance.lognormvariate(6.2, 1.2)))  # a task, perhaps with a file
            for _ in range(min(40, 1 + int(chance.expovariate(1 / 9)))):
                output = min(2000, int(chance.expovariate(1 / 150)) + 1)
                helpers = [
                    [*self._help(helper, chance)]
                    for _ in range(chance.randint(1, 3) if chance.random() < _HELPERS else 0)
                ]  # fmt: skip
                yield Turn(conversation, context.tokens, output, context.blocks, pause, helpers)
                context.add(output + min(10_000, chance.lognormvariate(5.8, 1.2)))
                pause = chance.expovariate(1 / 2)
            if chance.random() < 0.5:
                return
            pause = chance.expovariate(1 / 30)

    def _help(self, system: tuple[int, ...], chance: random.Random) -> Iterator[Turn]:
        context, conversation = _Context(system, self._take_blocks), next(self._conversations)
        context.add(min(4000, chance.lognormvariate(6, 0.8)))
        for number in range(min(20, 1 + int(chance.expovariate(1 / 5)))):
            output = min(2000, int(chance.expovariate(1 / 150)) + 1)
            yield Turn(
                conversation, context.tokens, output, context.blocks, chance.expovariate(1 / 2) if number else 0.0
            )
            context.add(output + min(10_000, chance.lognormvariate(5.8, 1.2)))


class _Context:
    """A prompt that grows."""

    def __init__(self, system: tuple[int, ...], take: Callable[[int], tuple[int, ...]]) -> None:
        self.blocks = system
        self.tokens = len(system) * BLOCK_TOKENS
        self._take = take

    def add(self, tokens: float) -> None:
        self.tokens += int(tokens) + 1
        self.blocks += self._take(self.tokens // BLOCK_TOKENS - len(self.blocks))
