"""What is asked of the operator at scale, out of all figures of a run. Pure."""

from __future__ import annotations

from typing import Any

FLOOR_FACTOR = 40 / 27
"""Time to Ready against that of the same workloads without an operator, in the same run."""
HOLD_MS = 20.0
GROWTH = 0.02
"""By which the second half of the events may add to the memory."""


def judge(floor: dict[str, Any], operator: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each thing asked: the figures, and `holds` where there is a bound."""
    ready, bare = operator["ready_seconds"], floor["ready_seconds"]
    writes = sum(operator["restart_writes"].values())
    hold = max((operator[f"{part}_holds_ms"][:1] or [0.0])[0] for part in ("first", "events", "restart"))
    half, after = operator["rss_mib_half"], operator["rss_mib_after"]
    requests = sum(operator["requests_per_model"].values())
    objects = operator["writes_per_model"].get("create", 0.0)
    return {
        "ready": {
            "seconds": round(ready, 1),
            "floor_seconds": round(bare, 1),
            "factor": round(ready / bare, 2),
            "holds": ready <= FLOOR_FACTOR * bare,
        },
        "restart": {"writes": writes, "holds": writes == 0},
        "event_loop": {"longest_hold_ms": hold, "holds": hold <= HOLD_MS},
        "requests": {
            "per_model": round(requests, 1),
            "objects_per_model": round(objects, 1),
            "per_object": round(requests / objects, 2) if objects else None,
        },
        "memory": {
            "events": operator["events"],
            "mib_before": round(operator["rss_mib_before"], 1),
            "mib_half": round(half, 1),
            "mib_after": round(after, 1),
            "holds": after <= (1 + GROWTH) * half,
        },
    }
