"""What a running workload may keep though the operator would write it otherwise today. Pure.

A pod template that differs in any byte restarts pods, so what means the same is left as it is: a time to drain that is
long enough, and the launch configuration of an earlier release that says the same in more words.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError
from tandem_api import names
from tandem_api.base import Wire
from tandem_api.launch import GatewayConfig, WorkerConfig

from tandem_operator.manifests import CONFIG_MAP, DEPLOYMENT, STATEFUL_SET, ChildKey, Manifest, child_key, dig, dig_list
from tandem_operator.planner import Children
from tandem_operator.rolling import is_new_template
from tandem_operator.workloads.blueprint import Blueprint, config_hash, sign
from tandem_operator.workloads.configs import CONFIG_FILE
from tandem_operator.workloads.pods import grace_seconds, template_grace_seconds

_GRACE = "terminationGracePeriodSeconds"
_CONFIG_TYPES: dict[str, type[Wire]] = {STATEFUL_SET.name: WorkerConfig, DEPLOYMENT.name: GatewayConfig}
_FOLLOWED_EVER = {STATEFUL_SET.name: frozenset({"drain_timeout_seconds"}), DEPLOYMENT.name: frozenset[str]()}
"""What pods of every release follow in a ConfigMap that may be changed. A configuration that is named by another rule
than this release's belongs to pods of an earlier one, which may follow no more than this."""


def keep_what_runs(blueprint: Blueprint, desired: Iterable[Manifest], live: Children) -> list[Manifest]:
    """`desired`, with what the live workloads may keep."""
    children = {child_key(child): child for child in desired}
    for key, workload in list(children.items()):
        present = live.get(key)
        if key.kind not in _CONFIG_TYPES or present is None:
            continue
        changed = _with_grace(blueprint, workload, present)
        kept = _kept_config(changed, present, children, live)
        if kept is not None and not is_new_template(inherits := sign(_with_config(changed, kept)), present):
            del children[ChildKey(CONFIG_MAP.name, str(config_name(workload)))]
            children |= {child_key(kept): kept, key: inherits}
        elif changed is not workload:
            children[key] = sign(changed)
    return list(children.values())


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
    is_fixed = bool(old.get("immutable"))
    wire = _CONFIG_TYPES[workload["kind"]]
    try:
        said = [wire.model_validate_json(dig(source, "data", CONFIG_FILE) or "") for source in (config_map, old)]
    except ValidationError:
        return None
    free = frozenset[str]() if is_fixed else _FOLLOWED_EVER[workload["kind"]]
    if said[0] != said[1].model_copy(update={field: getattr(said[0], field) for field in free}):
        return None
    kept = config_map | {
        "metadata": config_map["metadata"]
        | {
            "name": old["metadata"]["name"],
            "annotations": config_map["metadata"]["annotations"] | {names.ANNOTATION_CONFIG_HASH: config_hash(old)},
        },
        **({"data": old["data"], "immutable": True} if is_fixed else {}),
    }
    return sign(kept)


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
