"""What a model's gateways follow while they run, from its spec and from what they were told before. Pure.

The status keeps it: a name that was served before is served on for a while, and when that ends outlives the operator.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from tandem_api.launch import CanaryTraffic, GatewayRouting

from tandem_operator.objects.manifests import format_time, parse_time
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.configs import (
    gateway_convert_steps,
    gateway_cors,
    gateway_queue,
    gateway_store,
    gateway_timeouts,
    tracing,
)
from tandem_operator.workloads.pods import drain_seconds

FORMER_NAME_SECONDS = 60.0
"""A name from before is served at least this long; longer where `spec.drain.timeout` is. Gateways hear of a change
within a second, and clients should have learnt the new name by then."""
MAX_FORMER_NAMES = 3


def plan_routing(blueprint: Blueprint, *, now: datetime, canary: CanaryTraffic | None = None) -> GatewayRouting:
    """What gateways are told from `now` on."""
    before, name = blueprint.model.status.routing, blueprint.model.served_name
    known = [] if before is None else before.served_names
    until = None if before is None else parse_time(before.former_until)
    latest = now + timedelta(seconds=math.ceil(max(FORMER_NAME_SECONDS, drain_seconds(blueprint))))
    if known and known[0] != name:
        former, until = [other for other in known if other != name][:MAX_FORMER_NAMES], latest
    else:
        former = known[1:] if until is not None and now < until else []
        until = None if until is None else min(until, latest)  # a clock that was ahead serves a name no longer
    return GatewayRouting(
        served_names=[name, *former],
        former_until=format_time(until) if former and until is not None else None,
        canary=canary,
        timeouts=gateway_timeouts(blueprint),
        queue=gateway_queue(blueprint),
        drain_timeout_seconds=drain_seconds(blueprint),
        cors=gateway_cors(blueprint),
        tracing=tracing(blueprint),
        response_store=gateway_store(blueprint),
        min_priority=blueprint.model.spec.gateway.min_priority,
        explain=blueprint.model.spec.gateway.explain_routes,
        convert_step_seconds=gateway_convert_steps(blueprint),
    )


def seconds_left(routing: GatewayRouting | None, *, now: datetime) -> float | None:
    """Until a name from before is taken away; None where there is none."""
    until = None if routing is None else parse_time(routing.former_until)
    return None if until is None else max(0.0, (until - now).total_seconds())
