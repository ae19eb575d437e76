"""Requests through a proxy that flips one random bit now and then anywhere in the KV stream, handshakes included.

    python -m bench.transfer.soak [--requests 20000] [--seed 1]

No answer may differ from an undisturbed one and no request may fail. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from dataclasses import asdict

import torch

from tests.tandem_worker.transfer.flip_soak import run_flips

_ROUND = 1000
_EVERY_BYTES = (100_000, 30_000, 10_000)
"""From one damaged order in some hundred to as many that most prompts end up prefilled locally."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # each flip is told several times
    totals: Counter[str] = Counter()
    for number, start in enumerate(range(0, args.requests, _ROUND)):
        count = min(_ROUND, args.requests - start)
        outcome = asdict(run_flips(count, args.seed + number, _EVERY_BYTES[number % len(_EVERY_BYTES)]))
        decode, prefill = outcome.pop("decode"), outcome.pop("prefill")
        totals.update(outcome)
        for stats in (decode, prefill):
            totals.update({f"damaged_{kind}": n for kind, n in stats["integrity_failures"].items()})
            totals.update({f"refused_{reason}": n for reason, n in stats["refusals"].items()})
        print(f"{totals['requests']} requests, {totals['flips']} flips, {totals['wrong']} wrong", flush=True)
    print(json.dumps(totals))
    if totals["wrong"] or totals["failed"]:
        raise SystemExit("damage had an effect")


if __name__ == "__main__":
    main()
