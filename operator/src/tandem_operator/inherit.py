"""What a running workload may keep though the operator would write it otherwise today. Pure.

A pod template that differs in any byte restarts pods, so what means the same is left as it is: a time to drain that is
long enough, the launch configuration of an earlier release that says the same in more words, and a template without the
readiness gate.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError
from tandem_api import names
from tandem_api.base import Wire
from tandem_api.launch import GatewayConfig, WorkerConfig

from tandem_operator.manifests import (
    CONFIG_MAP,
    DEPLOYMENT,
    STATEFUL_SET,
    ChildKey,
    Manifest,
    annotations_of,
    child_key,
    dig,
    dig_list,
)
from tandem_operator.matching import satisfies
from tandem_operator.planner import Children
from tandem_operator.workloads.blueprint import TEMPLATE_HASH, Blueprint, config_hash, sign
from tandem_operator.workloads.configs import CONFIG_FILE
from tandem_operator.workloads.pods import grace_seconds, template_grace_seconds

_GRACE = "terminationGracePeriodSeconds"
_GATES = "readinessGates"
_CONFIG_TYPES: dict[str, type[Wire]] = {STATEFUL_SET.name: WorkerConfig, DEPLOYMENT.name: GatewayConfig}


def keep_what_runs(blueprint: Blueprint, desired: Iterable[Manifest], live: Children) -> list[Manifest]:
    """`desired`, with what the live workloads may keep."""
    children = {child_key(child): child for child in desired}
    for key, workload in list(children.items()):
        present = live.get(key)
        if key.kind not in _CONFIG_TYPES or present is None:
            continue
        changed = _with_grace(blueprint, workload, present)
        changed = _with_config(changed, present, children, live)
        changed = _without_gate(changed, present)
        if changed is not workload:
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


def _without_gate(workload: Manifest, present: Manifest) -> Manifest:
    """Pods of an earlier release have no readiness gate: one is no reason to replace them."""
    spec = workload["spec"]["template"]["spec"]
    if _GATES not in spec or _GATES in dig(present, "spec", "template", "spec"):
        return workload
    template = workload["spec"]["template"]
    plain = template | {"spec": {name: value for name, value in spec.items() if name != _GATES}}
    changed = workload | {"spec": workload["spec"] | {"template": plain}}
    applied = annotations_of(present).get(TEMPLATE_HASH)
    is_same = applied in (None, annotations_of(sign(changed))[TEMPLATE_HASH])
    return changed if is_same and satisfies(dig(present, "spec", "template"), plain) else workload


def _with_config(workload: Manifest, present: Manifest, children: dict[ChildKey, Manifest], live: Children) -> Manifest:
    """A ConfigMap that cannot be changed is from a release that wrote defaults out: kept while it says the same."""
    config_map, old = (
        source.get(ChildKey(CONFIG_MAP.name, str(_config_name(w))))
        for source, w in ((children, workload), (live, present))
    )
    if config_map is None or old is None or not old.get("immutable") or config_hash(old) is None:
        return workload
    wire = _CONFIG_TYPES[workload["kind"]]
    try:
        said = [wire.model_validate_json(dig(source, "data", CONFIG_FILE) or "") for source in (config_map, old)]
    except ValidationError:
        return workload
    if said[0] != said[1]:
        return workload
    del children[child_key(config_map)]
    kept = config_map | {
        "metadata": config_map["metadata"]
        | {
            "name": old["metadata"]["name"],
            "annotations": config_map["metadata"]["annotations"] | {names.ANNOTATION_CONFIG_HASH: config_hash(old)},
        },
        "data": old["data"],
        "immutable": True,
    }
    children[child_key(kept)] = sign(kept)
    volumes = [
        volume | {"configMap": volume["configMap"] | {"name": old["metadata"]["name"]}}
        if volume.get("name") == "config" and "configMap" in volume
        else volume
        for volume in dig_list(workload, "spec", "template", "spec", "volumes")
    ]
    return _with_template(
        workload, spec={"volumes": volumes}, annotations={names.ANNOTATION_CONFIG_HASH: config_hash(old)}
    )


def _config_name(workload: Manifest) -> str | None:
    volumes = dig_list(workload, "spec", "template", "spec", "volumes")
    return next((dig(v, "configMap", "name") for v in volumes if v.get("name") == "config"), None)


def _with_template(workload: Manifest, *, spec: Manifest, annotations: Manifest | None = None) -> Manifest:
    template = workload["spec"]["template"]
    metadata = template["metadata"]
    if annotations:
        metadata = metadata | {"annotations": metadata["annotations"] | annotations}
    changed = template | {"metadata": metadata, "spec": template["spec"] | spec}
    return workload | {"spec": workload["spec"] | {"template": changed}}
