"""Engines of other projects behind the same gateway: how each is asked, and how its answers become the client's."""

from __future__ import annotations

from tandem_api.engines import FOREIGN_ENGINES
from tandem_api.launch import GatewayConfig

from tandem_gateway.upstream.engines.contract import Engine, Host
from tandem_gateway.upstream.engines.sglang import SGLang
from tandem_gateway.upstream.engines.vllm import VLLM
from tandem_gateway.upstream.http1 import IDLE_SECONDS

IDLE_SHARE = 0.6
"""Of the time after which an engine closes an idle connection, this gateway keeps one: news takes its time."""


def build_engine(config: GatewayConfig, host: Host) -> Engine | None:
    """The adapter of another engine; None for Tandem's own."""
    if config.engine == "Tandem":
        return None
    adapter = VLLM if config.engine == "VLLM" else SGLang
    return adapter(host, worker_model=config.model_name, disaggregated=config.disaggregated)


def idle_seconds(config: GatewayConfig) -> float:
    """How long a connection to a worker may be idle and is still used."""
    engine = FOREIGN_ENGINES.get(config.engine)
    return IDLE_SECONDS if engine is None else IDLE_SHARE * engine.keep_alive_seconds
