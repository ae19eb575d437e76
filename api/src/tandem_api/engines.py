"""Engines other than Tandem's own: what is known of each, and what a model that runs on one may not ask for.

Facts about vLLM are from https://docs.vllm.ai/en/stable/features/nixl_connector_usage.html and its environment
variables, about SGLang from https://docs.sglang.io/docs/advanced_features/pd_disaggregation.md and its server
arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tandem_api.names import Role
from tandem_api.validation import cel_string, rule

EngineKind = Literal["Tandem", "VLLM", "SGLang"]
ENGINES: dict[str, EngineKind] = {kind: kind for kind in get_args(EngineKind)}
"""Every kind, by its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignEngine:
    """What differs from one engine to the next."""

    image: str
    """Published, of one release."""
    kv_port: int
    """The port where a worker is asked for blocks: vLLM's NIXL side channel, SGLang's bootstrap server."""
    kv_roles: frozenset[Role]
    """Roles whose workers are asked there."""
    decode_needs_prefill: bool
    """Whether decode workers compute no prompts."""
    keep_alive_seconds: float
    """After so long the engine's HTTP server closes a connection that nothing was asked over."""
    own_arguments: tuple[str, ...]
    """Which the operator writes, so that nobody else may."""

    @property
    def own_pattern(self) -> str:
        """Regular expression, of RE2 and of Python, for an argument that is one of them in whatever spelling the engine
        takes: short (`-tp`), with underscores, negated, or by a part of its value (`--kv-transfer-config.kv_role`)."""
        named = "|".join(name.replace("-", "[-_]") for name in self.own_arguments)
        return f"^--?(no[-_])?({named})([=.]|$)"


def needs_prefill(kind: EngineKind, role: Role) -> bool:
    """Whether a worker of this role computes no prompts."""
    engine = FOREIGN_ENGINES.get(kind)
    return engine is not None and engine.decode_needs_prefill and role is Role.DECODE


_HTTP_SERVER = ("host", "port", "api-key", "served-model-name", "ssl-keyfile", "ssl-certfile", "uds")
FOREIGN_ENGINES: dict[str, ForeignEngine] = {
    "VLLM": ForeignEngine(
        image="vllm/vllm-openai:v0.27.1",
        kv_port=5600,
        kv_roles=frozenset({Role.PREFILL, Role.DECODE}),
        decode_needs_prefill=False,
        keep_alive_seconds=5.0,
        own_arguments=(
            *_HTTP_SERVER, "model", "revision", "dtype", "max-model-len", "kv-transfer-config", "tensor-parallel-size",
            "pipeline-parallel-size", "data-parallel-size", "enable-prompt-tokens-details", "config",
            "tp", "pp", "dp",
        ),
    ),
    "SGLang": ForeignEngine(
        image="lmsysorg/sglang:v0.5.19",
        kv_port=8998,
        kv_roles=frozenset({Role.PREFILL}),
        decode_needs_prefill=True,
        keep_alive_seconds=5.0,
        own_arguments=(
            *_HTTP_SERVER, "model", "model-path", "revision", "dtype", "context-length", "disaggregation-mode",
            "disaggregation-bootstrap-port", "tp", "tp-size", "tensor-parallel-size",
            "pp-size", "pipeline-parallel-size", "dp", "dp-size", "data-parallel-size", "nnodes", "node-rank",
            "dist-init-addr", "enable-cache-report", "enable-metrics", "config",
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Limit:
    """A field that an engine of another project cannot honour."""

    path: str
    message: str
    holds: str
    """CEL over the spec; judged where `engine.kind` is another engine."""


def _unset(path: str, *values: str) -> str:
    """CEL: `path` is absent, or has its default: one of `values`."""
    parts = path.split(".")
    absent = " || ".join(f"!has(self.{'.'.join(parts[: end + 1])})" for end in range(len(parts)))
    return " || ".join([absent, *(f"self.{path} == {value}" for value in values)])


def _in_roles(path: str, test: str) -> str:
    """CEL: where a role says `path`, `test` holds of it (`{}`)."""
    rules: list[str] = []
    for role in ("prefill", "decode"):
        parts = f"{role}.{path}".split(".")
        absent = " || ".join(f"!has(self.{'.'.join(parts[: end + 1])})" for end in range(len(parts)))
        rules.append(f"({absent} || {test.format('self.' + '.'.join(parts))})")
    return " && ".join(rules)


_ARGS = "is of Tandem's own engine: remove it, and say what you want in engine.args, in the words of that engine"
_BY_TANDEM = "needs the measurements of Tandem's own workers"
_LIMITS = (
    _Limit(
        ".model.cache.prewarm",
        "is of Tandem's own workers, whose cache others do not read: remove it",
        _unset("model.cache.prewarm", "false"),
    ),
    _Limit(
        ".model.cache.pack",
        "is of Tandem's own workers, which alone read packed checkpoints: remove it",
        _unset("model.cache.pack", "'None'"),
    ),
    _Limit(
        ".engine.device",
        "must not be CPU with another engine's image, which is built for GPUs: write CUDA or Auto",
        "!has(self.engine.device) || self.engine.device != 'CPU'",
    ),
    _Limit(".engine.maxBatchTokens", _ARGS, _unset("engine.maxBatchTokens", "2048")),
    _Limit(".engine.maxRunningRequests", _ARGS, _unset("engine.maxRunningRequests", "256")),
    _Limit(".engine.stepTimeout", _ARGS, "!has(self.engine.stepTimeout)"),
    _Limit(".engine.freeFormGrammars", _ARGS, _unset("engine.freeFormGrammars", "false")),
    _Limit(".engine.requestChatTemplates", _ARGS, _unset("engine.requestChatTemplates", "false")),
    _Limit(".engine.tools", _ARGS, _unset("engine.tools", "'Auto'")),
    _Limit(".engine.generationSettings", _ARGS, _unset("engine.generationSettings", "'Model'")),
    _Limit(".engine.weights", _ARGS, _unset("engine.weights", "'Auto'")),
    _Limit(
        ".engine.speculative",
        _ARGS,
        " && ".join(
            f"({_unset(f'engine.speculative.{field}', *values)})"
            for field, values in (
                ("method", ("'Auto'", "'Off'")),
                ("maxTokens", ("8",)),
                ("adaptive", ("true",)),
                ("history", ("'64Mi'",)),
            )
        )
        + " && (!has(self.engine.speculative) || !has(self.engine.speculative.draft))",
    ),
    _Limit(".kv.memory", _ARGS, "!has(self.kv) || !has(self.kv.memory)"),
    _Limit(".kv.hostMemory", "is of Tandem's own engine: remove it", "!has(self.kv) || !has(self.kv.hostMemory)"),
    _Limit(".kv.disk", "is of Tandem's own engine: remove it", "!has(self.kv) || !has(self.kv.disk)"),
    _Limit(".kv.store", "is of Tandem's own engine: remove it", "!has(self.kv) || !has(self.kv.store)"),
    _Limit(
        ".kv.peers",
        "is of Tandem's own engine, others have connectors of their own: write Off",
        _unset("kv.peers", "'Off'"),
    ),
    _Limit(
        ".kv.transport",
        "is of Tandem's own engine: write Auto, and the other engine moves blocks as it does",
        _unset("kv.transport", "'Auto'"),
    ),
    _Limit(".kv.allowFallback", "is of Tandem's own engine: remove it", _unset("kv.allowFallback", "false")),
    _Limit(
        ".kv.verify",
        "is of Tandem's own engine, others check no blocks either way: remove it",
        _unset("kv.verify", "true"),
    ),
    _Limit(
        ".slo",
        f"{_BY_TANDEM}: remove it, and scale by the mode External or by hand",
        "!has(self.slo)",
    ),
    _Limit(
        ".decode",
        f"with scaling.mode SLO {_BY_TANDEM}: use Static or External",
        _in_roles("scaling.mode", "{} != 'SLO'"),
    ),
    _Limit(
        ".autoscaling.scaleToZero",
        f"{_BY_TANDEM}, because it goes with scaling.mode SLO: remove it",
        "!has(self.autoscaling) || !has(self.autoscaling.scaleToZero)",
    ),
    _Limit(
        ".decode",
        "must have nodesPerReplica 1 in both roles with another engine, whose pods each serve by themselves: use"
        " tensor or pipeline ranks on one node",
        _in_roles("nodesPerReplica", "{} == 1"),
    ),
    _Limit(
        ".decode",
        "must have expert and data ranks of 1 in both roles with another engine: raise replicas, or say it in"
        " engine.args",
        f"{_in_roles('parallelism.expert', '{} == 1')} && {_in_roles('parallelism.data', '{} == 1')}",
    ),
)
_OWN = (
    "has an argument that the operator writes itself: remove it, and use the field of the spec for it where it has one"
)
_NAMELESS = "has a value without the argument's name in front of it: write --NAME=VALUE"
_BARE = r"[^-]|-[0-9.]"
_WHOLE = r"-[^=]*="
_FOREIGN = "has(self.engine) && has(self.engine.kind) && self.engine.kind != 'Tandem'"
_NO_ARGS = f"are for the kinds {' and '.join(FOREIGN_ENGINES)}: remove them, Tandem's own engine has fields"


def foreign_rules() -> list[Any]:
    """The rules of a spec about engines of other projects."""
    rules = [rule(f"!({_FOREIGN}) || ({limit.holds})", limit.message, path=limit.path) for limit in _LIMITS]
    rules.append(
        rule(f"{_FOREIGN} || !has(self.engine) || !has(self.engine.args) || size(self.engine.args) == 0", _NO_ARGS,
             path=".engine.args")
    )  # fmt: skip
    rules.append(
        rule(
            "!has(self.engine) || !has(self.engine.args) || size(self.engine.args) == 0"
            f" || !self.engine.args[0].matches({cel_string(f'^({_BARE})')})",
            _NAMELESS,
            path=".engine.args",
            server_only=True,  # `find_nameless` looks at all of them
        )
    )
    for kind, engine in FOREIGN_ENGINES.items():
        rules.append(
            rule(
                f"!has(self.engine) || !has(self.engine.kind) || self.engine.kind != '{kind}'"
                f" || !has(self.engine.args) || self.engine.args.all(a, !a.matches('{engine.own_pattern}'))",
                _OWN,
                path=".engine.args",
            )
        )
    return rules


def find_nameless(arguments: Sequence[str]) -> str | None:
    """The sentence about the first argument that is the value of none, or of one that has its value already: CEL cannot
    compare what stands one after another."""
    for number, (before, each) in enumerate(zip(["-=", *arguments], arguments, strict=False)):
        if re.match(_BARE, each) and re.match(_WHOLE, before):
            return f"engine.args[{number}] is {each!r:.80}, which {_NAMELESS}"
    return None
