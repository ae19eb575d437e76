"""What a running workload may keep though the operator would write it otherwise today. Pure.

A pod template that differs in any byte restarts pods, so what means the same is left as it is: a time to drain that is
long enough, the launch configuration of an earlier release that says the same in more words, and a template without the
defaults that this release gives to pods, for as long as nothing else in it changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pydantic import ValidationError
from tandem_api import names
from tandem_api.base import Wire
from tandem_api.launch import GatewayConfig, WorkerConfig

from tandem_operator.children.templates import is_asked_for
from tandem_operator.objects.manifests import (
    CONFIG_MAP,
    DEPLOYMENT,
    STATEFUL_SET,
    ChildKey,
    Children,
    Manifest,
    child_key,
    dig,
    dig_dict,
    dig_list,
)
from tandem_operator.workloads import build_possible
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.child import config_hash, sign
from tandem_operator.workloads.configs import CONFIG_FILE, start_hash
from tandem_operator.workloads.pods import grace_seconds, template_grace_seconds

_ANNOTATIONS = ("spec", "template", "metadata", "annotations")
_GRACE = "terminationGracePeriodSeconds"
_CONFIG_TYPES: dict[str, type[Wire]] = {STATEFUL_SET.name: WorkerConfig, DEPLOYMENT.name: GatewayConfig}
_FOLLOWED_EVER = {STATEFUL_SET.name: frozenset({"drain_timeout_seconds"}), DEPLOYMENT.name: frozenset[str]()}
"""What pods of every release follow in a ConfigMap that may be changed. A configuration that is named by another rule
than this release's belongs to pods of an earlier one, which may follow no more than this."""


def keep_what_runs(blueprint: Blueprint, desired: Iterable[Manifest], live: Children) -> list[Manifest]:
    """`desired`, with what the live workloads may keep."""
    children = {child_key(child): child for child in desired}
    bare: dict[ChildKey, Manifest] | None = None
    for key, workload in list(children.items()):
        present = live.get(key)
        if key.kind not in _CONFIG_TYPES or present is None:
            continue
        changed = _as_live(blueprint, workload, present)
        found = _as_it_runs(changed, present, children, live)
        if found is None:
            bare = _without_defaults(blueprint) if bare is None else bare
            found = _as_it_runs(_as_live(blueprint, bare[key], present), present, children, live)
        if found is None:
            children[key] = workload if changed is workload else sign(changed)
            continue
        children[key], kept = found
        if kept is not None:
            del children[ChildKey(CONFIG_MAP.name, str(config_name(workload)))]
            children[child_key(kept)] = kept
    return list(children.values())


def _as_it_runs(
    workload: Manifest, present: Manifest, children: Children, live: Children
) -> tuple[Manifest, Manifest | None] | None:
    """`workload`, and the ConfigMap that it keeps if it does, where this replaces no pod; else None."""
    kept = _kept_config(workload, present, children, live)
    inherits = sign(workload if kept is None else _with_config(workload, kept))
    return (inherits, kept) if is_asked_for(inherits, present) else None


def _without_defaults(blueprint: Blueprint) -> dict[ChildKey, Manifest]:
    """Workloads as they are without what this release gives to pods that do not say."""
    built = build_possible(dataclasses.replace(blueprint, pod_defaults=False))
    return {child_key(child): child for child in built.children if child["kind"] in _CONFIG_TYPES}


def _as_live(blueprint: Blueprint, workload: Manifest, present: Manifest) -> Manifest:
    return _with_restart(blueprint, _with_grace(blueprint, workload, present), present)


def _with_restart(blueprint: Blueprint, workload: Manifest, present: Manifest) -> Manifest:
    """A wish to restart that is taken back restarts nobody, and one that comes while a revision is tried waits: what
    the canary goes back to must be what it came from."""
    rollout = blueprint.model.status.rollout
    have, want = (dig(w, *_ANNOTATIONS, names.ANNOTATION_RESTART) for w in (present, workload))
    if have == want or not (want is None or (rollout is not None and rollout.phase == "Canary")):
        return workload
    kept = {k: v for k, v in dig_dict(workload, *_ANNOTATIONS).items() if k != names.ANNOTATION_RESTART}
    template = workload["spec"]["template"]
    metadata = template["metadata"] | {"annotations": kept | ({} if have is None else {names.ANNOTATION_RESTART: have})}
    return workload | {"spec": workload["spec"] | {"template": template | {"metadata": metadata}}}


def _with_grace(blueprint: Blueprint, workload: Manifest, present: Manifest) -> Manifest:
    """Unless a podTemplate says how long, what is there is kept where it suffices."""
    have, want = (dig(w, "spec", "template", "spec", _GRACE) for w in (present, workload))
    lag = want - template_grace_seconds(blueprint) if isinstance(want, int) else 0
    is_generated = 0 <= lag <= 3
    if not is_generated or not isinstance(have, int) or have == want or have < grace_seconds(blueprint) + lag:
        return workload
    return _with_template(workload, spec={_GRACE: have})


def _kept_config(workload: Manifest, present: Manifest, children: Children, live: Children) -> Manifest | None:
    """A ConfigMap of another name that says the same is from a release that wrote defaults out, or counted more to what
    is read at start: kept while it does, unless pods are replaced anyway. One of the former cannot be changed."""
    config_map, old = (
        source.get(ChildKey(CONFIG_MAP.name, str(config_name(w))))
        for source, w in ((children, workload), (live, present))
    )
    if config_map is None or old is None or config_hash(old) in (None, config_hash(config_map)):
        return None
    is_fixed, text = bool(old.get("immutable")), config_map["data"]
    wire = _CONFIG_TYPES[workload["kind"]]
    try:
        said = [wire.model_validate_json(dig(source, "data", CONFIG_FILE) or "") for source in (config_map, old)]
    except ValidationError:
        return None
    free = frozenset[str]() if is_fixed else _FOLLOWED_EVER[workload["kind"]]
    if (plain := _without_measuring(said[0])) is not None and start_hash(plain) == config_hash(old):
        text = {CONFIG_FILE: plain.set_json()}
    elif said[0] != said[1].model_copy(update={field: getattr(said[0], field) for field in free}):
        return None
    kept = config_map | {
        "metadata": config_map["metadata"]
        | {
            "name": old["metadata"]["name"],
            "annotations": config_map["metadata"]["annotations"] | {names.ANNOTATION_CONFIG_HASH: config_hash(old)},
        },
        **({"data": old["data"], "immutable": True} if is_fixed else {"data": text}),
    }
    return sign(kept)


def _without_measuring(config: Wire) -> WorkerConfig | None:
    """The same of workers that move their blocks by TCP, as all did in releases that had nothing else; None where these
    do too. What `Auto` may find to be faster is no reason to replace who runs."""
    if not isinstance(config, WorkerConfig) or not config.kv.measure_transports:
        return None
    return config.model_copy(update={"kv": config.kv.model_copy(update={"measure_transports": False})})


def _with_config(workload: Manifest, config_map: Manifest) -> Manifest:
    """`workload` with pods that start from `config_map`."""
    volumes = [
        volume | {"configMap": volume["configMap"] | {"name": config_map["metadata"]["name"]}}
        if volume.get("name") == "config" and "configMap" in volume
        else volume
        for volume in dig_list(workload, "spec", "template", "spec", "volumes")
    ]
    return _with_template(
        workload, spec={"volumes": volumes}, annotations={names.ANNOTATION_CONFIG_HASH: config_hash(config_map)}
    )


def config_name(workload: Manifest) -> str | None:
    """Name of the ConfigMap that a workload's pods start from."""
    volumes = dig_list(workload, "spec", "template", "spec", "volumes")
    return next((dig(v, "configMap", "name") for v in volumes if v.get("name") == "config"), None)


def _with_template(workload: Manifest, *, spec: Manifest, annotations: Manifest | None = None) -> Manifest:
    template = workload["spec"]["template"]
    metadata = template["metadata"]
    if annotations:
        metadata = metadata | {"annotations": metadata["annotations"] | annotations}
    changed = template | {"metadata": metadata, "spec": template["spec"] | spec}
    return workload | {"spec": workload["spec"] | {"template": changed}}
