"""Whether a look-up is worth the wait: what it may save, by how often nothing was found lately. Any thread.

Of many prompts that nobody else has computed, the ends of conversations that stay where they are say, each would wait
for an answer that is no. How likely a yes is, is taken from how many look-ups were in vain since the last one that was
not: after n of them one in n + 1. A single find makes the next one sure to be asked, and so does now and then chance.
"""

from __future__ import annotations

LONGEST_ODDS = 63
"""More look-ups in vain than this do not speak against the next one: a long prompt is always worth one."""
EXPLORE = 16
"""One in so many that are not worth it is made all the same, so that it shows when others begin to write."""
_NEWS = 0.2
"""Weight of the last look-up in how long they take."""


class Odds:
    def __init__(self) -> None:
        self.in_vain = 0
        """Look-ups since the last one that found something, `LONGEST_ODDS` at most."""
        self.seconds = 0.0
        """What one takes, those included that were given up."""
        self._passed_over = 0

    def favour(self, num_blocks: int, seconds_per_block: float | None, most_seconds: float) -> bool:
        """Whether to ask for so many blocks, each of which takes so long to compute; None: nobody knows. A request
        waits for `most_seconds` at most, however long one look-up took lately."""
        seconds = min(self.seconds, most_seconds) * (1 + self.in_vain)
        if seconds_per_block is None or num_blocks * seconds_per_block > seconds:
            return True
        self._passed_over = (self._passed_over + 1) % EXPLORE
        return not self._passed_over

    def note_answer(self, *, found: bool) -> None:
        """One was answered."""
        self.in_vain = 0 if found else min(LONGEST_ODDS, self.in_vain + 1)

    def note_seconds(self, seconds: float) -> None:
        """One has taken so long."""
        self.seconds += _NEWS * (seconds - self.seconds) if self.seconds else seconds
