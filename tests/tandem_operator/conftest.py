from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = (HERE, *(HERE / name for name in ("reconcile", "autoscale", "rollout", "workloads")))
# `operator_objects` and servers, clusters and histories that tests of several rooms share.
sys.path[:0] = map(str, FOLDERS)
