"""The strategic merge of `spec.*.podTemplate` onto a generated pod template.

Maps merge; null removes a key; lists with a merge key merge item by item as Kubernetes' own strategic merge does, with
`$patch: delete` and `$patch: replace`; other lists are replaced. Labels and annotations that selectors, discovery and
rollouts rest on cannot be overlaid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tandem_api.names import GROUP

from tandem_operator.errors import InvalidOverlayError
from tandem_operator.manifests import Manifest

_MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "env": "name", "volumes": "name", "imagePullSecrets": "name",
    "volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort", "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey", "resourceClaims": "name",
}  # fmt: skip
_RESERVED_LABELS = (f"{GROUP}/", "app.kubernetes.io/")


def overlay_template(template: Manifest, overlay: Mapping[str, Any], *, path: str) -> Manifest:
    """`template` with `overlay` merged in; neither argument is changed.

    Raises:
        InvalidOverlayError: the overlay has the wrong shape or touches what is the operator's; names the field.
    """
    _refuse_reserved(overlay.get("metadata") or {}, path=f"{path}.metadata")
    merged = _merge(template, {key: value for key, value in overlay.items() if value is not None}, path=path)
    return cast(Manifest, merged)


def _refuse_reserved(metadata: Any, *, path: str) -> None:
    if not isinstance(metadata, dict):
        raise InvalidOverlayError(f"{path} must be a map with labels and annotations")
    fields = cast(Manifest, metadata)
    if unknown := sorted(fields.keys() - {"labels", "annotations"}):
        raise InvalidOverlayError(f"{path}.{unknown[0]} cannot be set: write labels and annotations only")
    for kind in ("labels", "annotations"):
        values: object = fields.get(kind) or {}
        if not isinstance(values, dict):
            raise InvalidOverlayError(f"{path}.{kind} must be a map")
        for key in cast(Manifest, values):
            if key.startswith(_RESERVED_LABELS):
                raise InvalidOverlayError(f"{path}.{kind}: {key} is set by the operator: use a name of your own domain")


def _merge(base: Any, overlay: Any, *, path: str) -> Any:
    if isinstance(overlay, dict):
        return _merge_maps(base, cast(Manifest, overlay), path=path)
    if isinstance(overlay, list):
        key = _MERGE_KEYS.get(path.rsplit(".", 1)[-1])
        if key is not None:
            return _merge_lists(base, cast(list[Any], overlay), key=key, path=path)
        return cast(list[Any], overlay)
    if isinstance(base, dict | list) and overlay is not None:
        raise InvalidOverlayError(f"{path} must be a {'map' if isinstance(base, dict) else 'list'}")
    return overlay


def _merge_maps(base: Any, overlay: Manifest, *, path: str) -> Manifest:
    if base is not None and not isinstance(base, dict):
        raise InvalidOverlayError(f"{path} must not be a map")
    directive = overlay.get("$patch")
    overlay = {key: value for key, value in overlay.items() if key != "$patch"}
    result: Manifest = {} if directive == "replace" else dict(cast(Manifest, base or {}))
    for key, value in overlay.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge(result.get(key), value, path=f"{path}.{key}")
    return result


def _merge_lists(base: Any, overlay: list[Any], *, key: str, path: str) -> list[Any]:
    if base is not None and not isinstance(base, list):
        raise InvalidOverlayError(f"{path} must not be a list")
    merged: list[Manifest] = list(cast(list[Manifest], base or []))
    for index, item in enumerate(overlay):
        if not isinstance(item, dict) or key not in item:
            raise InvalidOverlayError(f"{path}[{index}] needs `{key}`: items of this list merge by it")
        entry = cast(Manifest, item)
        position = next((at for at, have in enumerate(merged) if have.get(key) == entry[key]), None)
        if entry.get("$patch") == "delete":
            merged = [have for have in merged if have.get(key) != entry[key]]
        elif position is None:
            merged.append(_merge_maps(None, entry, path=f"{path}[{index}]"))
        else:
            merged[position] = _merge_maps(merged[position], entry, path=f"{path}[{index}]")
    return merged
