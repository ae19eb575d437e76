"""What a decision says for people, and the figures in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tandem_api.names import Role
from tandem_api.wording import name_some

from tandem_operator.autoscale.plan.contract import SHARE_SECONDS, RoleDecision, RoleState, Snapshot
from tandem_operator.autoscale.plan.history import History
from tandem_operator.autoscale.plan.joint import NVLINK, SATURATED, TRANSFER
from tandem_operator.autoscale.plan.load import Load

_NAMED = 3
"""Replicas that a sentence names."""


def busiest_link(decode: RoleState, history: History) -> tuple[float | None, str]:
    """The share of the busiest link of decode replicas, and its name. Keys and values come over one or the other: a
    transfer is timed from end to end, and NVLinks tell bytes."""
    nvlink = history.link_share(Role.DECODE, SHARE_SECONDS)
    if nvlink is None or (decode.transfer_share is not None and decode.transfer_share >= nvlink):
        return decode.transfer_share, TRANSFER
    return nvlink, NVLINK


def report_gpus(decode: RoleState, history: History) -> dict[str, float]:
    """What is measured of GPUs beside what the planner has of its own: blocks, and the time of transfers."""
    told = {
        "vram_share": decode.gpus.vram_share,
        "nvlink_share": history.link_share(Role.DECODE, SHARE_SECONDS),
        "transfer_share": decode.transfer_share,
    }
    return {name: round(share, 3) for name, share in told.items() if share is not None}


def say_gpus(fleet: Snapshot, history: History) -> str:
    """What GPUs limit, and which are not well."""
    said = ""
    decode = fleet.roles[Role.DECODE]
    if decode.gpus.is_full:
        said += (
            f" VRAM of {decode.gpus.vram_rank} is {100 * (decode.gpus.vram_share or 0):.0f}% full: no decode replica "
            "is planned fuller than they have been."
        )
    share, link = busiest_link(decode, history)
    if share is not None and share >= SATURATED:
        where = decode.gpus.link_rank if link == NVLINK else "a decode replica"
        said += f" The {link} of {where} is {100 * share:.0f}% busy: more prefill per decode replica is of no use."
    unwell = [name for state in fleet.roles.values() for name in state.gpus.unwell]
    if unwell:
        said += f" Not well: {name_some(unwell, _NAMED, '; ')}."
    return said


def say_passing(load: Load) -> str:
    """What nothing is ordered for, and what would serve it."""
    if load.passing is None:
        return ""
    return (
        f" Left out: bursts that come and go within {load.passing.longest:.0f} s, sooner than a new replica would be "
        "of use; a higher scaling.min serves them."
    )


def say_roles(roles: Mapping[Role, RoleDecision]) -> str:
    parts: list[str] = []
    for role, one in sorted(roles.items(), key=lambda item: item[0].value, reverse=True):
        if one.replicas == one.observed:
            parts.append(f"{role.value} stays at {one.observed} ({one.limit}; demand asks for {one.required})")
        else:
            parts.append(f"{role.value} {one.observed} → {one.replicas} ({one.limit}; demand asks for {one.required})")
    return "; ".join(parts)


def say_odd(fleet: Snapshot) -> str:
    """Names, for people, those whose figures were not believed."""
    odd = [name for state in fleet.roles.values() for name in state.odd]
    if not odd:
        return ""
    return f" Left out, as most others say something else: the speed that {name_some(odd, _NAMED)} told."


def explain(roles: dict[Role, RoleDecision], inputs: dict[str, float]) -> str:
    """For people."""
    return (
        f"{say_roles(roles)}. {inputs['prompt_tokens_per_second']:.0f} prompt tokens/s arrive uncached, "
        f"{inputs['prompt_tokens_per_second_ahead']:.0f} when a new replica is ready, "
        f"{inputs['prefill_tokens_per_second']:.0f} per prefill replica, {inputs['queued_tokens']:.0f} queued; "
        f"{inputs['requests_per_second']:.2f} requests/s of {inputs['output_tokens']:.0f} output tokens, "
        f"{inputs['decode_tokens_per_second']:.0f} tokens/s per decode replica, "
        f"KV {100 * inputs['kv_share']:.0f}% used."
    )


def explain_shared(roles: dict[Role, RoleDecision], inputs: dict[str, float]) -> str:
    """For people, of replicas that do both."""
    mixed = 1000 * inputs["mixed_step_seconds"]
    return (
        f"{say_roles(roles)}. {inputs['prompt_tokens_per_second']:.0f} prompt tokens/s arrive uncached, "
        f"{inputs['prompt_tokens_per_second_ahead']:.0f} when a new replica is ready, "
        f"{inputs['prompt_tokens_per_second_per_replica']:.0f} per replica beside its answers, "
        f"{inputs['queued_tokens']:.0f} queued; {inputs['requests_per_second']:.2f} requests/s of "
        f"{inputs['output_tokens']:.0f} output tokens; prompts take {100 * inputs['prompt_share']:.0f}% of the time, "
        f"in steps of {f'{mixed:.0f} ms' if mixed else 'unmeasured length'} instead of "
        f"{1000 * inputs['decode_step_seconds']:.0f} ms, KV {100 * inputs['kv_share']:.0f}% used."
    )


def report_demand(load: Load) -> dict[str, float]:
    return {
        "prompt_tokens_per_second": round(load.tokens.now, 1),
        "prompt_tokens_per_second_ahead": round(load.tokens.ahead, 1),
        "deviation": round(load.tokens.deviation, 1),
    }
