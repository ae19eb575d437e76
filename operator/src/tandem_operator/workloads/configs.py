"""Launch configurations and the ConfigMaps that carry them.

A ConfigMap is named after what its pods read at start and what was set of that. A pod that restarts in the middle of a
rollout therefore starts with the configuration its template was made for, and never with that of another revision; and
neither a release that adds a default nor a field that is read while running restarts one.
"""

from __future__ import annotations

import hashlib

from tandem_api import names
from tandem_api.changes import followed_fields
from tandem_api.crd.engine import KVDisk, KVStore
from tandem_api.launch import (
    MAX_HELD_BYTES,
    ClientTLS,
    CORSRules,
    FileSharing,
    GatewayConfig,
    GatewayQueue,
    GatewayTimeouts,
    GroupConfig,
    KVConfig,
    KVDiskConfig,
    KVStoreConfig,
    ModelSource,
    PackedForm,
    SchedulerConfig,
    SpeculativeConfig,
    StoreLimits,
    TracingConfig,
    TTFTDeadline,
    WorkerConfig,
)
from tandem_api.names import Role
from tandem_api.quantities import parse_duration, parse_quantity

from tandem_operator.objects.manifests import CONFIG_MAP, Manifest
from tandem_operator.workloads.blueprint import Blueprint, component_of, gives_blocks, shares_files
from tandem_operator.workloads.child import build_child
from tandem_operator.workloads.pods import drain_seconds
from tandem_operator.workloads.transports import transport_of

CONFIG_FILE = names.CONFIG_PATH.rsplit("/", 1)[1]


def worker_config(blueprint: Blueprint, role: Role) -> WorkerConfig:
    """What a worker of `role` is told."""
    spec = blueprint.model.spec
    memory = None if spec.kv.memory is None else int(parse_quantity(spec.kv.memory))
    worker, transport = blueprint.worker_spec(role), transport_of(blueprint)
    return WorkerConfig(
        model_name=blueprint.name,
        served_name=blueprint.model.served_name,
        role=role,
        revision=blueprint.revision_of(role),
        model=ModelSource(
            uri=spec.model.uri,
            revision=blueprint.weights_revision,
            hub_endpoint=blueprint.release.hub_endpoint,
            sharing=FileSharing(enabled=True) if shares_files(blueprint) else None,
            pack=_packed_form(blueprint),
        ),
        device=spec.engine.device,
        dtype=spec.engine.dtype,
        weights=spec.engine.weights,
        speculative=SpeculativeConfig(
            method=spec.engine.speculative.method,
            max_tokens=spec.engine.speculative.max_tokens,
            adaptive=spec.engine.speculative.adaptive,
            history_bytes=int(parse_quantity(spec.engine.speculative.history)),
            draft=_draft_source(blueprint),
        ),
        max_model_len=spec.engine.max_model_len,
        kv=KVConfig(
            memory_bytes=memory,
            host_memory_bytes=0 if spec.kv.host_memory is None else int(parse_quantity(spec.kv.host_memory)),
            verify=spec.kv.verify,
            disk=_kv_disk(spec.kv.disk),
            peers=gives_blocks(blueprint, role),
            store=_kv_store(spec.kv.store),
            transport="TCP" if transport == "Auto" else transport,
            measure_transports=transport == "Auto",
            allow_fallback=spec.kv.allow_fallback,
        ),
        scheduler=SchedulerConfig(
            max_running_requests=spec.engine.max_running_requests, max_batch_tokens=spec.engine.max_batch_tokens
        ),
        group=GroupConfig(
            parallelism=worker.parallelism.for_launch(),
            num_nodes=worker.nodes_per_replica,
            service=names.workload_name(blueprint.name, role),
        ),
        free_form_grammars=spec.engine.free_form_grammars,
        request_chat_templates=spec.engine.request_chat_templates,
        tools=spec.engine.tools,
        generation_settings=spec.engine.generation_settings,
        keys_path=names.KEYS_PATH if spec.engine.kind == "Tandem" else None,
        drain_timeout_seconds=drain_seconds(blueprint),
        ttft_target=_ttft_deadline(blueprint),
        tracing=tracing(blueprint),
        standby=blueprint.standby > 0,
        step_timeout_seconds=None if spec.engine.step_timeout is None else parse_duration(spec.engine.step_timeout),
    )


def _draft_source(blueprint: Blueprint) -> ModelSource | None:
    head = blueprint.model.spec.engine.speculative.head
    if head is None:
        return None
    revision = blueprint.draft_revision or head.revision
    return ModelSource(uri=head.uri, revision=revision, hub_endpoint=blueprint.release.hub_endpoint)


def _packed_form(blueprint: Blueprint) -> PackedForm | None:
    cache = blueprint.model.spec.model.cache
    return None if cache is None or cache.pack == "None" else cache.pack


def gateway_config(blueprint: Blueprint) -> GatewayConfig:
    """What a gateway is told."""
    spec = blueprint.model.spec
    return GatewayConfig(
        model_name=blueprint.name,
        served_name=blueprint.model.served_name,
        namespace=blueprint.model.metadata.namespace,
        disaggregated=spec.prefill is not None,
        timeouts=gateway_timeouts(blueprint),
        queue=gateway_queue(blueprint),
        keys_path=names.KEYS_PATH,
        drain_timeout_seconds=drain_seconds(blueprint),
        max_held_bytes=_held_bytes(spec.gateway.resources.limits.get("memory")),
        cors=gateway_cors(blueprint),
        tls=_client_tls(blueprint),
        tracing=tracing(blueprint),
        response_store=gateway_store(blueprint),
        min_priority=spec.gateway.min_priority,
        explain=spec.gateway.explain_routes,
        convert_step_seconds=gateway_convert_steps(blueprint),
    )


def tracing(blueprint: Blueprint) -> TracingConfig | None:
    """What the model says, and for what it does not, the release. None: its requests are not traced."""
    wanted, usual = blueprint.model.spec.observability.tracing, blueprint.release.tracing
    endpoint = wanted.endpoint or (usual and usual.endpoint)
    if not wanted.enabled or endpoint is None:
        return None
    percent = wanted.sampling_percent
    if percent is None:
        percent = 100.0 if usual is None else usual.sampling_percent
    return TracingConfig(endpoint=endpoint, sampling_percent=percent)


def _kv_disk(disk: KVDisk | None) -> KVDiskConfig | None:
    if disk is None:
        return None
    most = disk.max_daily_writes
    return KVDiskConfig(
        size_bytes=int(parse_quantity(disk.size)),
        write_through=disk.write_through,
        max_daily_writes=None if most is None else int(parse_quantity(most)),
    )


def _kv_store(store: KVStore | None) -> KVStoreConfig | None:
    if store is None:
        return None
    return KVStoreConfig(given_bytes=int(parse_quantity(store.disk or store.memory)))  # a disk takes what memory has


def gateway_timeouts(blueprint: Blueprint) -> GatewayTimeouts:
    timeouts = blueprint.model.spec.gateway.timeouts
    return GatewayTimeouts(
        first_token_seconds=parse_duration(timeouts.first_token),
        idle_seconds=parse_duration(timeouts.idle),
        answer_seconds=parse_duration(timeouts.answer),
    )


def gateway_cors(blueprint: Blueprint) -> CORSRules | None:
    cors = blueprint.model.spec.gateway.cors
    if cors is None:
        return None
    return CORSRules(
        allow_origins=cors.allow_origins,
        allow_headers=cors.allow_headers,
        allow_credentials=cors.allow_credentials,
        max_age_seconds=parse_duration(cors.max_age),
    )


def gateway_convert_steps(blueprint: Blueprint) -> float | None:
    """How long a decode worker's step may be with a part of a prompt that it computes because prefill workers are
    behind; None: it computes none for that reason. Without a target nobody can say what its streams may wait.
    """
    spec = blueprint.model.spec
    if spec.slo is None or spec.prefill is None or not spec.gateway.convert_decode_workers:
        return None
    return spec.slo.tpot.seconds


def gateway_store(blueprint: Blueprint) -> StoreLimits | None:
    store = blueprint.model.spec.gateway.response_store
    if store is None:
        return None
    return StoreLimits(max_bytes=int(parse_quantity(store.max_bytes)), ttl_seconds=parse_duration(store.ttl))


def _client_tls(blueprint: Blueprint) -> ClientTLS | None:
    tls = blueprint.model.spec.gateway.tls
    if tls is None:
        return None
    return ClientTLS(path=names.TLS_PATH, min_version=tls.min_version, plain_http=tls.plain_http)


def gateway_queue(blueprint: Blueprint) -> GatewayQueue:
    spec = blueprint.model.spec
    return GatewayQueue(
        max_requests=spec.gateway.queue.max,
        ttl_seconds=parse_duration(spec.queue_ttl),
        ttft_target=_ttft_deadline(blueprint),
        wakes=spec.scale_to_zero is not None,
    )


def _ttft_deadline(blueprint: Blueprint) -> TTFTDeadline | None:
    slo = blueprint.model.spec.slo
    if slo is None:
        return None
    return TTFTDeadline(seconds=slo.ttft.seconds, seconds_per_token=slo.ttft.seconds_per_token)


def _held_bytes(limit: str | None) -> int:
    """A gateway takes requests until they fill half of its memory: reading a body takes as much again for a moment."""
    if limit is None:
        return MAX_HELD_BYTES
    return min(MAX_HELD_BYTES, int(parse_quantity(limit)) // 2)


def build_config_map(blueprint: Blueprint, role: Role, config: WorkerConfig | GatewayConfig) -> Manifest:
    """The ConfigMap that holds `config` where `names.CONFIG_PATH` expects it."""
    text_hash = start_hash(config)
    manifest = build_child(
        blueprint,
        CONFIG_MAP,
        f"{names.workload_name(blueprint.name, role)}-{text_hash}",
        {"data": {CONFIG_FILE: config.set_json()}},
        component=component_of(role),
        role=role,
    )
    manifest["metadata"]["annotations"][names.ANNOTATION_CONFIG_HASH] = text_hash
    return manifest


def start_hash(config: WorkerConfig | GatewayConfig) -> str:
    """Names what a pod reads at start: what it follows does not count."""
    return hashlib.sha256(config.set_json(without=followed_fields(type(config))).encode()).hexdigest()[:8]
