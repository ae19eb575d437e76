"""Whether a look-up is worth the wait: what it may save, by how often nothing was found lately. Any thread.

Of many prompts that nobody else has computed, the ends of conversations that stay where they are say, each would wait
for an answer that is no. How likely a yes is, is taken from how many look-ups were in vain since the last one that was
not: after n of them one in n + 1. A single find makes the next one sure to be asked, and so does now and then chance.
Where a part of all prompts is there, several in vain in a row say little: a yes is no less likely than of late.
"""

from __future__ import annotations

LONGEST_ODDS = 63
"""More look-ups in vain than this do not speak against the next one: a long prompt is always worth one."""
EXPLORE = 16
"""One in so many that are not worth it is made all the same, so that it shows when others begin to write."""
_SHARE_NEWS = 1 / 64
"""Weight of the last look-up in the share of those that find something."""
_NEWS = 0.2
"""Weight of the last look-up in how long they take."""


class Odds:
    def __init__(self) -> None:
        self.in_vain = 0
        """Look-ups since the last one that found something, `LONGEST_ODDS` at most."""
        self.share = 0.0
        """Share of look-ups that found something of late."""
        self.seconds = 0.0
        """What one takes, those included that were given up."""
        self._passed_over = 0

    def favour(self, num_blocks: int, seconds_per_block: float | None, most_seconds: float) -> bool:
        """Whether to ask for so many blocks, each of which takes so long to compute; None: nobody knows. A request
        waits for `most_seconds` at most, however long one look-up took lately."""
        likely = max(1 / (1 + self.in_vain), self.share)
        if seconds_per_block is None or num_blocks * seconds_per_block * likely > min(self.seconds, most_seconds):
            return True
        self._passed_over = (self._passed_over + 1) % EXPLORE
        return not self._passed_over

    def note_answer(self, *, found: bool) -> None:
        """One was answered."""
        self.in_vain = 0 if found else min(LONGEST_ODDS, self.in_vain + 1)
        self.share += _SHARE_NEWS * (found - self.share)

    def note_seconds(self, seconds: float) -> None:
        """One has taken so long."""
        self.seconds += _NEWS * (seconds - self.seconds) if self.seconds else seconds
