"""The Secret with the keys of a model's pods: its manifest around the rings.

Only here are rings turned into a Secret and back. The manifest that everything else sees, compares and hashes holds no
key, so a rotation restarts nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime

from tandem_api import names
from tandem_api.keys import KeyRing, parse_key_ring

from tandem_operator.keys.rotation import KeyState, KeyStep
from tandem_operator.objects.errors import UnreadableKeysError
from tandem_operator.objects.manifests import SECRET, Manifest, annotations_of, dig, labels_of, parse_time
from tandem_operator.workloads.blueprint import Blueprint, digest
from tandem_operator.workloads.child import build_child
from tandem_operator.workloads.keys import KEY_FILES

ROTATE_ANNOTATION = f"{names.GROUP}/rotate-keys"
"""On an InferenceModel: a new value asks for new keys. On the Secret: the value that its newest keys answer."""
STEP_ANNOTATION = f"{names.GROUP}/keys-step"
"""On the Secret: a `KeyStep`, for people; the rings themselves tell how far they are."""
SINCE_ANNOTATION = f"{names.GROUP}/keys-since"
"""On the Secret: when that step was taken."""
_REQUEST_MAX = 253


def build_keys(blueprint: Blueprint) -> Manifest:
    """The Secret without its keys."""
    return build_child(blueprint, SECRET, names.keys_name(blueprint.name), {"type": "Opaque"}, component="keys")


def rotation_request(model: Manifest) -> str | None:
    """The wish to rotate on an InferenceModel. A long one is kept by its digest."""
    request = annotations_of(model).get(ROTATE_ANNOTATION)
    return request if request is None or len(request) <= _REQUEST_MAX else digest(request)


def read_keys(secret: Manifest) -> KeyState:
    """The keys in a Secret of ours.

    Raises:
        UnreadableKeysError: a ring is missing or is none; no part of it is in the sentence.
    """
    annotations = annotations_of(secret)
    step, since = annotations.get(STEP_ANNOTATION), parse_time(annotations.get(SINCE_ANNOTATION))
    return KeyState(
        rings={file: _read_ring(secret, file) for file in KEY_FILES},
        step=KeyStep(step) if step in list(KeyStep) else None,
        since=None if since is None else since.timestamp(),
        request=annotations.get(ROTATE_ANNOTATION),
    )


def write_keys(desired: Manifest, live: Manifest | None, state: KeyState) -> Manifest:
    """`desired`, or `live` brought to it, with these keys. What else a person put into the Secret stays."""
    assert state.since is not None
    metadata = dict(desired["metadata"])
    if live is not None:
        metadata = live["metadata"] | {
            "labels": labels_of(live) | labels_of(desired),
            "annotations": annotations_of(live) | annotations_of(desired),
            "ownerReferences": metadata["ownerReferences"],
        }
    notes = {STEP_ANNOTATION: state.step, ROTATE_ANNOTATION: state.request, SINCE_ANNOTATION: _format_time(state.since)}
    kept = {key: value for key, value in metadata["annotations"].items() if key not in notes}
    metadata["annotations"] = kept | {key: str(value) for key, value in notes.items() if value is not None}
    data: Mapping[str, str] = dig(live, "data") or {}
    rings = {file: base64.b64encode(ring.encode().encode()).decode() for file, ring in state.rings.items()}
    return (live or desired) | {"metadata": metadata, "data": {**data, **rings}}


def _read_ring(secret: Manifest, file: str) -> KeyRing:
    name = secret["metadata"]["name"]
    text = dig(secret, "data", file)
    undo = "put back what was there, or delete the Secret and new keys are made"
    if text is None:
        raise UnreadableKeysError(f"Secret {name} has no {file}: {undo}")
    try:
        return parse_key_ring(base64.b64decode(text, validate=True))
    except binascii.Error:
        raise UnreadableKeysError(f"Secret {name}: {file} is not base64: {undo}") from None
    except ValueError as error:
        raise UnreadableKeysError(f"Secret {name}: {file} cannot be read: {error}: {undo}") from None


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
