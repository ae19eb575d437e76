"""Conversations whose turns go round, over workers with disks that give each other blocks: what of them is cached.

    python -m bench.kv.sharing [--sessions 15] [--turns 4]

Two prefill and two decode workers of SmolLM2 with little memory. Each request goes to the next pair, which is told who
answered the conversation last, as a gateway would tell it; beside it the same with neither disks nor peers, the same
conversations that stay with their pair, and one worker that has nothing cached, with whose answers all others are
compared. The machine should be idle: what comes late is computed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from bench.kv.__main__ import judge
from bench.kv.rotation import Seen, converse_by_affinity, converse_with_peers, converse_without_cache
from e2e.model import find_model

MEMORY_BYTES = 96 << 20
"""Of each worker: about four thousand tokens, a third of what all conversations have in the end. A worker lends a
quarter of it at a time, which is a whole conversation."""
SHARE_GOAL = 0.02
"""Of the prompt tokens: what round robin with disks and peers may have cached less than affinity with them."""
ALONE_GOAL = 1 / 3
"""Round robin without them, of what it has cached with them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=15, help="conversations whose turns go round; default 15, odd")
    parser.add_argument("--turns", type=int, default=4, help="of each conversation; default 4")
    options = parser.parse_args()
    model, (sessions, turns) = find_model(), (options.sessions, options.turns)
    seen: dict[str, Seen] = {"no cache": converse_without_cache(model, sessions, turns)}
    with tempfile.TemporaryDirectory() as name:
        disks = Path(name)
        seen["affinity"] = converse_by_affinity(model, MEMORY_BYTES, sessions, turns, disks / "affinity", peers=True)
        seen["round robin"] = converse_with_peers(model, MEMORY_BYTES, sessions, turns, disks / "rotation", peers=True)
        seen["round robin, memory"] = converse_with_peers(model, MEMORY_BYTES, sessions, turns, None, peers=False)
    for kind, each in seen.items():
        told = f"{100 * each.cached_share:.1f}% of {each.prompt_tokens} prompt tokens cached"
        print(f"{kind}: {told}; loaded: {each.loaded_tokens:.0f}; loads cut: {each.loads_cut:.0f}")
    plain, with_them = seen.pop("no cache"), seen["round robin"]
    differ = sum(each.answers[at] != answer for each in seen.values() for at, answer in enumerate(plain.answers))
    alone = seen["round robin, memory"].cached_share / with_them.cached_share if with_them.cached_share else 1.0
    rows: dict[str, Any] = {
        "cached share, affinity less round robin with disks and peers": judge(
            seen["affinity"].cached_share - with_them.cached_share, SHARE_GOAL
        ),
        "round robin without disks and peers, of with them": judge(alone, ALONE_GOAL),
        "answers that are not those without a cache": judge(differ, 0),
    }
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "conversations that go round": rows}))


if __name__ == "__main__":
    main()
