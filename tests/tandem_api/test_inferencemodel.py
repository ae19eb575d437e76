from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from tandem_api.crd.resource import InferenceModel

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def parse(**spec: Any) -> InferenceModel:
    metadata = {"name": "m", "namespace": "n"}
    return InferenceModel.model_validate({"metadata": metadata, "spec": {"model": {"uri": "hf://a/b"}} | spec})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_parse(path: Path) -> None:
    models = [d for d in yaml.safe_load_all(path.read_text()) if d["kind"] == "InferenceModel"]
    assert models
    for model in models:
        model["metadata"]["namespace"] = "default"
        InferenceModel.model_validate(model)


def test_defaults() -> None:
    model = parse()
    assert (model.served_name, model.spec.decode.replicas, model.spec.prefill) == ("m", 1, None)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="autoscale"):
        parse(autoscale=True)


@pytest.mark.parametrize(
    "uri", ["hf://a/b", "pvc://claim/", "pvc://claim/a/b", "file:///models/x.gguf", "file:///a/..b/.c/d.."]
)
def test_good_uris(uri: str) -> None:
    assert parse(model={"uri": uri}).spec.model.uri == uri


@pytest.mark.parametrize(
    "uri",
    [
        "a/b",
        "hf://a",
        "https://a/b",
        "file://models",
        "pvc://A/b",
        "hf://a/b\n",
        "",
    ],
)
def test_bad_uris_say_what_to_write(uri: str) -> None:
    with pytest.raises(ValidationError, match="must be hf://ORGANIZATION/REPOSITORY"):
        parse(model={"uri": uri})


@pytest.mark.parametrize("uri", ["file:///../../etc", "pvc://a/b/..", "file:///a/%2E./b", "pvc://a/..%2Fb"])
def test_paths_do_not_climb(uri: str) -> None:
    with pytest.raises(ValidationError, match=r"must not have `\.\.` in its path"):
        parse(model={"uri": uri})


def test_whole_numbers_are_quantities() -> None:
    model = parse(decode={"resources": {"limits": {"nvidia.com/gpu": 1, "cpu": "500m"}}})
    assert model.spec.decode.resources.limits == {"nvidia.com/gpu": "1", "cpu": "500m"}


@pytest.mark.parametrize("text", ["60", "500ms", "", "1s1h"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(ValidationError, match="must be a duration"):
        parse(drain={"timeout": text})


def test_long_names_are_refused() -> None:
    with pytest.raises(ValidationError, match="at most 40"):
        InferenceModel.model_validate(
            {"metadata": {"name": "a" * 41, "namespace": "n"}, "spec": {"model": {"uri": "hf://a/b"}}}
        )


def test_a_role_is_one_process_unless_it_says_otherwise() -> None:
    role = parse().spec.decode
    assert (role.nodes_per_replica, role.parallelism.for_launch().num_ranks, role.ranks_per_pod) == (1, 1, 1)


def test_ranks_are_shared_out_among_the_pods() -> None:
    role = parse(prefill={"nodesPerReplica": 2, "parallelism": {"tensor": 4, "pipeline": 2, "data": 3}}).spec.prefill
    assert role is not None
    assert (role.parallelism.for_launch().num_ranks, role.ranks_per_pod) == (24, 12)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ranks_that_cannot_be_shared_out_are_refused(role: str) -> None:
    with pytest.raises(ValidationError, match="nodesPerReplica must divide the ranks"):
        parse(**{role: {"nodesPerReplica": 2, "parallelism": {"tensor": 3}}})


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "expert", "data"])
@pytest.mark.parametrize("count", [0, 65])
def test_axes_are_bounded(axis: str, count: int) -> None:
    with pytest.raises(ValidationError, match=axis):
        parse(decode={"parallelism": {axis: count}})


@pytest.mark.parametrize(
    ("rollout", "replicas", "surge", "unavailable"),
    [
        ({}, 1, 1, 0),
        ({}, 4, 1, 1),
        ({}, 32, 8, 1),
        ({"maxSurge": 0}, 1, 0, 1),
        ({"maxSurge": 2}, 4, 2, 1),
        ({"maxUnavailable": 0}, 4, 1, 0),
        ({"maxUnavailable": 0}, 30, 8, 0),
        ({"maxUnavailable": 1}, 1, 0, 1),
        ({"maxUnavailable": "25%"}, 8, 0, 2),
        ({"maxUnavailable": "25%"}, 3, 1, 0),
        ({"maxUnavailable": "25%", "maxSurge": 0}, 3, 0, 1),
        ({"maxSurge": "10%", "maxUnavailable": "0%"}, 32, 4, 0),
        ({"maxSurge": "50%", "maxUnavailable": "100%"}, 3, 2, 3),
        ({"type": "Recreate", "maxSurge": 3}, 4, 0, 4),
    ],
)
def test_budgets_of_a_rollout(rollout: dict[str, Any], replicas: int, surge: int, unavailable: int) -> None:
    found = parse(rollout=rollout).spec.rollout
    assert (found.surge_of(replicas), found.unavailable_of(replicas)) == (surge, unavailable)


STEPS = [{"weight": 10, "duration": "5m"}, {"weight": 50, "duration": "10m"}]


def test_a_single_replica_is_tried_beside_itself() -> None:
    rollout = parse(rollout={"maxUnavailable": 1, "canary": {"steps": STEPS}}).spec.rollout
    assert (rollout.surge_of(1), rollout.surge_of(4)) == (1, 0)


@pytest.mark.parametrize("share", [-1, 1001, "101%", "2.5%", "half", "", "%", "01%", True, 2.0])
def test_shares_that_cannot_be_are_refused(share: Any) -> None:
    with pytest.raises(ValidationError, match=r"rollout.maxSurge|Input should be"):
        parse(rollout={"maxSurge": share})


@pytest.mark.parametrize(
    ("canary", "more", "message"),
    [
        ({"steps": []}, {}, "at least 1 item"),
        ({"steps": list(reversed(STEPS))}, {}, "must not fall from step to step"),
        ({"steps": [{"weight": 100, "duration": "1m"}]}, {}, "less than or equal to 99"),
        ({"steps": STEPS, "maxTTFT": {}}, {}, "either a factor"),
        ({"steps": STEPS, "maxTTFT": {"factor": 2, "duration": "1s"}}, {}, "either a factor"),
        ({"steps": STEPS, "maxErrorRate": 101}, {}, "less than or equal to 100"),
        ({"steps": STEPS}, {"type": "Recreate"}, "needs the type RollingUpdate"),
        ({"steps": STEPS}, {"maxSurge": 0}, "has room for a canary only"),
    ],
)
def test_canaries_that_cannot_be(canary: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        parse(rollout={"canary": canary} | more)


def test_a_canary() -> None:
    told = {"steps": STEPS, "maxErrorRate": 2, "maxTTFT": {"percentile": 90, "factor": 1.5}}
    canary = parse(rollout={"canary": told}).spec.rollout.canary
    assert canary is not None
    assert canary.max_ttft is not None
    assert (canary.max_error_rate, canary.max_ttft.factor, canary.min_requests) == (2.0, 1.5, 20)
    assert parse(decode={"replicas": 2}, rollout={"canary": told, "maxSurge": 0}).spec.rollout.canary == canary


def test_a_rollout_that_could_replace_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="maxSurge and maxUnavailable are both 0"):
        parse(rollout={"maxSurge": 0, "maxUnavailable": "0%"})


@pytest.mark.parametrize(
    "origin",
    ["*", "https://app.example.com", "http://localhost:3000", "http://[::1]:3000", "tauri://localhost", "https://a:80"],
)
def test_good_origins(origin: str) -> None:
    cors = parse(gateway={"cors": {"allowOrigins": [origin]}}).spec.gateway.cors
    assert cors is not None
    assert (cors.allow_origins, cors.allow_headers, cors.max_age) == ([origin], [], "10m")


@pytest.mark.parametrize(
    ("origin", "sentence"),
    [
        ("https://app.example.com/", "without a path"),
        ("HTTPS://app.example.com", "in lower case"),
        ("app.example.com", "must be \\* or an origin"),
        ("https://*.example.com", "must be \\* or an origin"),
        ("null", "must be \\* or an origin"),
    ],
)
def test_bad_origins_say_what_to_write(origin: str, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        parse(gateway={"cors": {"allowOrigins": [origin]}})


@pytest.mark.parametrize("cors", [{}, {"allowOrigins": []}, {"allowOrigins": ["*"], "allowHeaders": ["*"]}])
def test_cors_names_origins_and_headers(cors: Any) -> None:
    with pytest.raises(ValidationError):
        parse(gateway={"cors": cors})


def test_a_store_of_responses() -> None:
    store = parse(gateway={"responseStore": {"maxBytes": "256Mi"}}).spec.gateway.response_store
    assert store is not None
    assert (store.max_bytes, store.ttl) == ("256Mi", "1h")
    assert parse(gateway={}).spec.gateway.response_store is None
    limits = {"limits": {"memory": "512Mi"}}
    assert parse(gateway={"replicas": 0, "resources": limits, "responseStore": {"maxBytes": "128Mi", "ttl": "30m"}})


@pytest.mark.parametrize(
    ("gateway", "sentence"),
    [
        ({"responseStore": {}}, "maxBytes"),
        ({"responseStore": {"maxBytes": "much"}}, "must be a Kubernetes quantity"),
        ({"responseStore": {"maxBytes": "1Mi", "ttl": "soon"}}, "must be a duration"),
        ({"responseStore": {"maxBytes": "1Mi", "size": 3}}, "size"),
        ({"replicas": 2, "responseStore": {"maxBytes": "1Mi"}}, "replicas must not be more than 1 while responseStore"),
        (
            {"resources": {"limits": {"memory": "1Gi"}}, "responseStore": {"maxBytes": "257Mi"}},
            "maxBytes must not be more than a quarter of resources.limits.memory",
        ),
    ],
)
def test_a_store_that_cannot_be_says_what_to_write(gateway: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        parse(gateway=gateway)


SLO_MODE = {"scaling": {"mode": "SLO", "max": 4}}
SLO_TARGETS = {"ttft": {"seconds": 0.5, "secondsPerThousandTokens": 0.2}, "tpot": {"seconds": 0.05}}


ASLEEP = {"autoscaling": {"scaleToZero": {}}, "slo": SLO_TARGETS}
BOTH_SLO = {"prefill": SLO_MODE, "decode": SLO_MODE}


def test_scaling_to_zero() -> None:
    spec = parse(**ASLEEP, **BOTH_SLO).spec
    assert spec.scale_to_zero is not None
    assert (spec.scale_to_zero.idle_after, spec.queue_ttl) == ("15m", "10m")
    assert parse(**ASLEEP, **BOTH_SLO, gateway={"queue": {"ttl": "2m"}}).spec.queue_ttl == "2m"
    assert parse(**ASLEEP, decode=SLO_MODE).spec.scale_to_zero is not None, "workers that do both sleep too"
    fixed = parse(**ASLEEP, prefill={"replicas": 2}, gateway={"queue": {"max": 0}}).spec
    assert (fixed.scale_to_zero, fixed.queue_ttl) == (None, "30s"), "not looked at in the mode Static"
    assert parse().spec.queue_ttl == "30s"
    more = {"min": 2, "max": 4, "mode": "SLO"}
    resting = {"autoscaling": {"scaleToZero": {"standby": {"replicas": 2}}}, "slo": SLO_TARGETS}
    assert parse(**resting, prefill={"scaling": more}, decode={"scaling": more}).spec.standby == 2
    assert parse(**resting).spec.standby == spec.standby == 0, "not looked at in the mode Static, and none by default"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"prefill": SLO_MODE}, "scaleToZero needs every worker role to have scaling.mode SLO"),
        ({"decode": {"scaling": {"mode": "External"}}}, "needs every worker role to have scaling.mode SLO"),
        (BOTH_SLO | {"decode": {"scaling": {"mode": "External"}}}, "needs every worker role to have scaling.mode SLO"),
        (BOTH_SLO | {"gateway": {"replicas": 0}}, "gateways hold the request that wakes the model"),
        (BOTH_SLO | {"gateway": {"queue": {"max": 0}}}, "queue.max must let the first request wait for a start"),
        (BOTH_SLO | {"gateway": {"queue": {"ttl": "0s"}}}, "queue.ttl must let the first request wait .* 1m or more"),
        (BOTH_SLO | {"gateway": {"queue": {"ttl": "30s"}}}, "queue.ttl must let the first request wait"),
        (
            BOTH_SLO | {"autoscaling": {"scaleToZero": {"standby": {"replicas": 2}}}},
            "autoscaling.scaleToZero.standby.replicas must be at most scaling.min of every worker role",
        ),
        (
            BOTH_SLO
            | {
                "autoscaling": {"scaleToZero": {"standby": {}}},
                "decode": SLO_MODE | {"parallelism": {"tensor": 2}},
            },
            "autoscaling.scaleToZero.standby needs workers of one rank",
        ),
        ({"autoscaling": {"scaleToZero": {"standby": {"replicas": 0}}}}, "greater than or equal to 1"),
        ({"autoscaling": {"scaleToZero": {"idleAfter": "soon"}}}, "must be a duration"),
        ({"autoscaling": {"scaleToZero": {"idle": "5m"}}}, "idle"),
    ],
)
def test_scaling_to_zero_that_cannot_be(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        parse(**(ASLEEP | spec))


def test_a_model_that_says_nothing_of_scaling_has_none() -> None:
    spec = parse(prefill={}).spec
    assert {role.scaling.mode for role in spec.workers} == {"Static"}
    told = spec.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)
    assert not {"slo", "autoscaling"} & told.keys()
    assert "scaling" not in told["prefill"]


def test_scaling_by_targets() -> None:
    spec = parse(
        prefill=SLO_MODE | {"parallelism": {"tensor": 2}}, decode=SLO_MODE, slo=SLO_TARGETS,
        autoscaling={"gpuBudget": 3, "roleRatio": {"max": 2}, "behavior": {"scaleDownStabilization": "5m"}},
    ).spec  # fmt: skip
    assert spec.slo is not None
    assert (spec.slo.ttft.percentile, spec.slo.ttft.limit(2000)) == (95, 0.9)
    assert spec.prefill is not None
    assert (spec.prefill.num_gpus, spec.prefill.fewest, spec.autoscaling.dry_run) == (2, 1, False)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"decode": {"scaling": {"mode": "SLO"}}}, "max is needed with mode SLO"),
        ({"decode": {"scaling": {"min": 3, "max": 2}}}, "min must not be above max"),
        ({"decode": {"scaling": {"min": 0}}}, "greater than or equal to 1"),
        ({"decode": SLO_MODE}, "slo is needed by a role with scaling.mode SLO"),
        ({"prefill": {}, "decode": SLO_MODE}, "slo is needed by a role with scaling.mode SLO"),
        ({"slo": {"ttft": {"seconds": 1}}}, "tpot"),
        ({"autoscaling": {"priority": 1001}}, "less than or equal to 1000"),
        ({"slo": SLO_TARGETS | {"ttft": {"seconds": 0}}}, "ttft.seconds"),
        ({"autoscaling": {"roleRatio": {"min": 3, "max": 2}}}, "min must not be above max"),
        ({"prefill": {"replicas": 2}, "autoscaling": {"gpuBudget": 2}}, "is less than what the fewest replicas"),
        (
            {"prefill": {"parallelism": {"tensor": 4}}, "decode": SLO_MODE, "slo": SLO_TARGETS,
             "autoscaling": {"gpuBudget": 4}},
            "is less than what the fewest replicas",
        ),
        (
            {"decode": {"nodesPerReplica": 2, "parallelism": {"tensor": 2}, "scaling": {"mode": "External"}}},
            "External needs nodesPerReplica to be 1",
        ),
        ({"decode": {"scaling": {"mode": "External"}}, "rollout": {"maxUnavailable": 0}}, "which has no surge"),
        (
            {"decode": {"scaling": {"mode": "External"}}, "rollout": {"canary": {"steps": STEPS}}},
            "a canary counts replicas",
        ),
        (
            {"prefill": {"replicas": 2}, "decode": {"replicas": 2} | SLO_MODE, "slo": SLO_TARGETS,
             "rollout": {"maxSurge": 0, "canary": {"steps": STEPS}}},
            "has room for a canary only",
        ),
    ],
)  # fmt: skip
def test_scaling_that_cannot_be(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        parse(**spec)


ELSEWHERE = [{"kind": "VLLM"}, {"kind": "SGLang"}]


@pytest.mark.parametrize("engine", ELSEWHERE, ids=lambda engine: engine["kind"])
@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"engine": {"maxBatchTokens": 64}}, "engine.maxBatchTokens is of Tandem's own engine"),
        ({"engine": {"maxRunningRequests": 64}}, "engine.maxRunningRequests is of Tandem's own engine"),
        ({"engine": {"stepTimeout": "9s"}}, "engine.stepTimeout is of Tandem's own engine"),
        ({"engine": {"freeFormGrammars": True}}, "engine.freeFormGrammars is of Tandem's own engine"),
        ({"engine": {"requestChatTemplates": True}}, "engine.requestChatTemplates is of Tandem's own engine"),
        ({"engine": {"tools": "Off"}}, "engine.tools is of Tandem's own engine"),
        ({"engine": {"weights": "Plain"}}, "engine.weights is of Tandem's own engine"),
        ({"engine": {"speculative": {"method": "Lookup"}}}, "engine.speculative is of Tandem's own engine"),
        ({"engine": {"speculative": {"maxTokens": 4}}}, "engine.speculative is of Tandem's own engine"),
        ({"engine": {"speculative": {"adaptive": False}}}, "engine.speculative is of Tandem's own engine"),
        ({"engine": {"speculative": {"history": "0"}}}, "engine.speculative is of Tandem's own engine"),
        ({"engine": {"speculative": {"draft": {"uri": "hf://a/b"}}}}, "engine.speculative is of Tandem's own engine"),
        ({"engine": {"device": "CPU"}}, "engine.device must not be CPU"),
        ({"engine": {"args": ["--served-model-name=x"]}}, "engine.args has an argument that the operator writes"),
        ({"engine": {"args": ["--port", "1"]}}, "engine.args has an argument that the operator writes"),
        ({"engine": {"args": ["--api_key=x"]}}, "engine.args has an argument that the operator writes"),
        ({"engine": {"args": ["--port=1\n"]}}, "engine.args has an argument that the operator writes"),
        ({"engine": {"args": ["--seed=1", "-tp", "2"]}}, "engine.args has an argument that the operator writes"),
        ({"engine": {"args": ["0.9"]}}, r"engine.args\[0\] is '0.9', which has a value without the argument's name"),
        ({"engine": {"args": ["-1"]}}, r"engine.args\[0\] is '-1', which has a value"),
        ({"engine": {"args": ["--seed", "1", "--x=2", "3"]}}, r"engine.args\[3\] is '3', which has a value"),
        ({"engine": {"args": ["--dtype.x=1"]}}, "engine.args has an argument that the operator writes"),
        ({"kv": {"memory": "2Gi"}}, "kv.memory is of Tandem's own engine"),
        ({"kv": {"disk": {"size": "2Gi"}}}, "kv.disk is of Tandem's own engine"),
        ({"kv": {"peers": "Auto"}}, "kv.peers is of Tandem's own engine"),
        ({"kv": {"transport": "TCP"}}, "kv.transport is of Tandem's own engine"),
        ({"kv": {"transport": "Mooncake"}}, "kv.transport is of Tandem's own engine"),
        ({"kv": {"transport": "Mooncake", "allowFallback": True}}, "kv.transport is of Tandem's own engine"),
        ({"kv": {"verify": False}}, "kv.verify is of Tandem's own engine"),
        ({"slo": SLO_TARGETS}, "slo needs the measurements of Tandem's own workers"),
        ({"autoscaling": {"scaleToZero": {}}}, "autoscaling.scaleToZero needs the measurements"),
        ({"decode": {"nodesPerReplica": 2, "parallelism": {"tensor": 2}}}, "must have nodesPerReplica 1 in both roles"),
        ({"decode": {"parallelism": {"data": 2}}}, "must have expert and data ranks of 1"),
    ],
)
def test_what_another_engine_cannot_do_is_refused(engine: dict[str, Any], spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        parse(**spec | {"engine": engine | spec.get("engine", {})})
    if "args" not in spec.get("engine", {}):
        assert parse(**spec)


def test_another_engine_gets_its_arguments() -> None:
    args = ["--gpu-memory-utilization=0.8", "--port-of-something", "value", "-O3", "--x=$(echo; `y` \"'"]
    assert parse(engine={"kind": "VLLM", "args": args}, decode={"parallelism": {"tensor": 4}}).spec.engine.args == args
    with pytest.raises(ValidationError, match=r"engine\.args are for the kinds VLLM and SGLang"):
        parse(engine={"args": args})


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"method": "EAGLE"}, "'Auto', 'Off', 'Lookup' or 'Draft'"),
        ({"method": "Lookup", "draft": {"uri": "hf://a/b"}}, "draft is a head, and method Lookup guesses without one"),
        ({"method": "Draft", "draft": {"revision": "main"}}, "uri"),
        ({"method": "Draft", "draft": {"uri": "s3://a/b"}}, "must be hf://"),
        ({"maxTokens": 0}, "greater than or equal to 1"),
        ({"maxTokens": 33}, "less than or equal to 32"),
        ({"history": "-1"}, "quantity"),
        ({"history": "much"}, "quantity"),
    ],
)
def test_speculation_that_there_is_not_is_refused(speculative: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        parse(engine={"speculative": speculative})


@pytest.mark.parametrize("kind", ["Tandem", "VLLM", "SGLang"])
@pytest.mark.parametrize("speculative", [None, {}, {"method": "Auto"}, {"method": "Off"}])
def test_the_default_is_no_wish_that_another_engine_refuses(kind: str, speculative: dict[str, Any] | None) -> None:
    told = {"kind": kind} | ({} if speculative is None else {"speculative": speculative})
    assert parse(engine=told).spec.engine.speculative.method == (speculative or {}).get("method", "Auto")


def test_the_model_may_bring_a_head() -> None:
    """Whether it does only workers can tell, who have its files."""
    assert parse(engine={"speculative": {"method": "Draft"}}).spec.engine.speculative.head is None


def test_a_head_is_for_groups_of_ranks_too() -> None:
    speculative = {"method": "Auto", "draft": {"uri": "hf://a/b", "revision": "v1"}}
    head = parse(engine={"speculative": speculative}).spec.engine.speculative.head
    assert head is not None
    assert (head.uri, head.revision) == ("hf://a/b", "v1")
    assert parse(engine={"speculative": speculative | {"method": "Off"}}).spec.engine.speculative.head is None
    for axis in ("tensor", "pipeline", "expert", "data"):
        assert parse(engine={"speculative": speculative}, decode={"parallelism": {axis: 2}})
