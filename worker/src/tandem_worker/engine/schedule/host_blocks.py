"""Room in host memory for the KV of preempted sequences, and when to use it.

A host block belongs to one sequence: nothing is shared or cached there. The engine decides which bytes are where.
"""

from __future__ import annotations


class HostBlocks:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Blocks of host memory that hold nothing."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks of host memory that hold KV of preempted sequences."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """The caller has seen `num_available >= count`. Mostly ascending runs, which are copied in one piece."""
        assert count <= len(self._free), f"{count} host blocks wanted, {len(self._free)} available"
        if not count:
            return []
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Give back blocks that `allocate` gave; each exactly once."""
        self._free.extend(reversed(blocks))

    def check(self, held: list[int]) -> None:
        """Raise AssertionError unless `held` and the free blocks are all blocks, each once. For tests."""
        assert sorted(held + self._free) == list(range(self.num_blocks))


def is_moving_cheaper(
    num_tokens: int, num_blocks: int, *, seconds_per_block: float, prefill_tokens_per_second: float | None
) -> bool:
    """Whether a sequence's blocks should go to the host and back rather than be computed again.

    `seconds_per_block` is for both ways. A worker that never prefills (its rate is unknown) has least time to begin.
    """
    if prefill_tokens_per_second is None:
        return True
    return num_blocks * seconds_per_block < num_tokens / prefill_tokens_per_second
