"""The strategic merge of `spec.*.podTemplate` onto a generated pod template.

Maps merge; null removes a key; lists with merge keys merge item by item as Kubernetes' own strategic merge does, with
`$patch: delete` and `$patch: replace` for maps, items and whole lists; other lists are replaced. Of fields that exclude
each other (the sources of a volume, `value` and `valueFrom`, the handlers of a probe) the overlay's one stays. Labels
and annotations that selectors, discovery and rollouts rest on cannot be overlaid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tandem_api.names import GROUP

from tandem_operator.objects.errors import InvalidOverlayError
from tandem_operator.objects.manifests import Manifest

_MERGE_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",), "initContainers": ("name",), "env": ("name",), "volumes": ("name",),
    "imagePullSecrets": ("name",), "volumeMounts": ("mountPath",), "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"), "hostAliases": ("ip",), "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}  # fmt: skip
"""Fields that tell the items of a list apart. Of several, the API server's own: two items may share the first one."""
_KEY_DEFAULTS = {"protocol": "TCP"}
_HANDLERS = frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"})
_ALTERNATIVES = {"env": frozenset({"value", "valueFrom"})} | dict.fromkeys(
    ("livenessProbe", "readinessProbe", "startupProbe", "preStop", "postStart"), _HANDLERS
)
"""What excludes each other in it, or in its items."""
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
        keys = _MERGE_KEYS.get(path.rsplit(".", 1)[-1])
        if keys is not None:
            return _merge_lists(base, cast(list[Any], overlay), keys=keys, path=path)
        return cast(list[Any], overlay)
    if isinstance(base, dict | list) and overlay is not None:
        raise InvalidOverlayError(f"{path} must be a {'map' if isinstance(base, dict) else 'list'}")
    return overlay


def _merge_maps(base: Any, overlay: Manifest, *, path: str) -> Manifest:
    if base is not None and not isinstance(base, dict):
        raise InvalidOverlayError(f"{path} must not be a map")
    directive = _directive(overlay, path=path)
    overlay = {key: value for key, value in overlay.items() if key != "$patch"}
    kept = cast(Manifest, base or {})
    if excluded := _alternatives(kept, overlay, path=path):
        kept = {key: value for key, value in kept.items() if key not in excluded}
    result: Manifest = {} if directive == "replace" else dict(kept)
    for key, value in overlay.items():
        where = f"{path}.{key}"
        if key.startswith("$"):
            raise InvalidOverlayError(f"{where} is not known: of the directives there is $patch alone")
        if value is None or (isinstance(value, dict) and _directive(cast(Manifest, value), path=where) == "delete"):
            result.pop(key, None)
        else:
            result[key] = _merge(result.get(key), value, path=where)
    return result


def _directive(overlay: Manifest, *, path: str) -> str | None:
    directive = overlay.get("$patch")
    if directive not in (None, "delete", "replace", "merge"):
        raise InvalidOverlayError(f"{path}.$patch must be delete, replace or merge")
    return directive


def _alternatives(base: Manifest, overlay: Manifest, *, path: str) -> set[str]:
    """Fields of `base` that those of `overlay` stand instead of."""
    field = path.rsplit(".", 1)[-1]
    name = field.partition("[")[0]
    if name == "volumes" and field != name:
        # A volume is a name and one source.
        alternatives = (base.keys() | overlay.keys()) - {"name"}
    else:
        alternatives = _ALTERNATIVES.get(name, frozenset[str]())
    chosen = {key for key in alternatives if overlay.get(key) is not None}
    return {key for key in alternatives - chosen if key in base} if chosen else set()


def _merge_lists(base: Any, overlay: list[Any], *, keys: tuple[str, ...], path: str) -> list[Any]:
    if base is not None and not isinstance(base, list):
        raise InvalidOverlayError(f"{path} must not be a list")
    merged: list[Manifest] = list(cast(list[Manifest], base or []))
    if any(item == {"$patch": "replace"} for item in overlay):
        merged, overlay = [], [item for item in overlay if item != {"$patch": "replace"}]
    for index, item in enumerate(overlay):
        where = f"{path}[{index}]"
        if not isinstance(item, dict) or keys[0] not in item:
            raise InvalidOverlayError(f"{where} needs `{keys[0]}`: items of this list merge by it")
        entry = cast(Manifest, item)
        same = [at for at, have in enumerate(merged) if _identity(have, keys) == _identity(entry, keys)]
        if _directive(entry, path=where) == "delete":
            # One that is to go need not be told apart further than the overlay does.
            named = [key for key in keys if key in entry]
            merged = [have for have in merged if any(have.get(key) != entry[key] for key in named)]
        elif same:
            merged[same[0]] = _merge_maps(merged[same[0]], entry, path=where)
        else:
            merged.append(_merge_maps(None, entry, path=where))
    return merged


def _identity(item: Manifest, keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(item.get(key, _KEY_DEFAULTS.get(key)) for key in keys)
