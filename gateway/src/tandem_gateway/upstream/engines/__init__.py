"""Engines of other projects behind the same gateway: how each is asked, and how its answers become the client's."""

from __future__ import annotations

from tandem_api.engines import FOREIGN_ENGINES, EngineKind

from tandem_gateway.upstream.engines.contract import Engine, Host
from tandem_gateway.upstream.engines.sglang import SGLang
from tandem_gateway.upstream.engines.vllm import VLLM
from tandem_gateway.upstream.http1 import IDLE_SECONDS

ADAPTERS = {"VLLM": VLLM, "SGLang": SGLang}
"""One for each of `FOREIGN_ENGINES`."""
IDLE_SHARE = 0.6
"""Share of the time after which an engine closes an idle connection that this gateway keeps one: news takes its
time."""


def build_engines(host: Host, *, worker_model: str) -> dict[str, Engine]:
    """An adapter for each engine but Tandem's own. `worker_model` is what their workers call the model."""
    return {kind: ADAPTERS[kind](host, worker_model=worker_model) for kind in FOREIGN_ENGINES}


def idle_seconds(kind: EngineKind) -> float:
    """How long a connection to a worker may be idle and is still used."""
    engine = FOREIGN_ENGINES.get(kind)
    return IDLE_SECONDS if engine is None else IDLE_SHARE * engine.keep_alive_seconds
