"""Which model is served, where its files come from, and where they are kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tandem_api.changes import Change
from tandem_api.crd.authored import Authored
from tandem_api.crd.fields import ModelURI, ObjectName, Revision
from tandem_api.validation import RULES_KEY, Matches, rule


class SecretKey(Authored):
    name: ObjectName
    """Name of a Secret in the model's namespace."""
    key: Annotated[
        str,
        Matches(r"[-._a-zA-Z0-9]+", "must be a key of the Secret: letters, digits, '-', '_' and '.'"),
        Field(max_length=253),
    ] = "token"
    """Key inside the Secret that holds the access token."""


_NO_CLAIM = (
    "fills a PersistentVolumeClaim before workers start, and a volume that ends with its pod cannot be filled"
    " beforehand: name a claim in persistentVolumeClaim, or remove prewarm"
)


_NOTHING_KEPT = (
    "packs what is kept in a PersistentVolumeClaim, and a volume that ends with its pod keeps nothing: name a claim in"
    " persistentVolumeClaim, or remove pack"
)


class ModelCache(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.prewarm) || !self.prewarm || has(self.persistentVolumeClaim)",
                    _NO_CLAIM,
                    path=".prewarm",
                ),
                rule(
                    "!has(self.pack) || self.pack == 'None' || has(self.persistentVolumeClaim)",
                    _NOTHING_KEPT,
                    path=".pack",
                ),
            ]
        }
    )

    persistent_volume_claim: ObjectName | None = None
    """A claim that the workers share: one of them downloads, the others wait and reuse. It must be ReadWriteMany, or
    ReadWriteOnce on a single node. Without it every pod downloads into a volume of its own."""
    peers: bool = False
    """Workers get the model's files from each other, and from the hub what nobody has."""
    prewarm: Annotated[bool, Change.OPERATOR] = False
    """A Job downloads, verifies and prepares the model in the claim before workers start, and before a new revision
    rolls out."""
    pack: Literal["Fixed", "Archive", "None"] = "None"
    """How safetensors files are kept in the claim, bit for bit. Whoever downloads packs and verifies them, and leaves
    the packed copy alone there. `Archive`: a third smaller. `Fixed`: a quarter smaller, read without work under
    `engine.weights: Lossless`. Takes room for both copies meanwhile, and switches `peers` off."""


def hub_only(field: str, meaning: str, *, unset: str | None = None) -> Any:
    """A rule that `field` is written only beside an hf:// uri."""
    absent = f"!has(self.{field})" + ("" if unset is None else f" || self.{field} == '{unset}'")
    message = f"is {meaning} of an hf:// repository: remove it, or let uri be hf://ORGANIZATION/REPOSITORY"
    return rule(f"{absent} || self.uri.startsWith('hf://')", message, path=f".{field}", server_only=True)


ServedName = Annotated[
    str,
    Matches(r"[A-Za-z0-9][A-Za-z0-9_.:/-]*", "must be letters, digits and '_.:/-', for example smollm2"),
    Field(max_length=128),
]


class Model(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                hub_only("revision", "the branch, tag or commit", unset="main"),
                hub_only("secretRef", "the access token"),
                hub_only("cache", "the download folder"),
                rule(
                    "!has(self.followRevision) || !self.followRevision || self.uri.startsWith('hf://')",
                    "is about the branch of an hf:// repository: remove it, or let uri be hf://ORGANIZATION/REPOSITORY",
                    path=".followRevision",
                    server_only=True,
                ),
            ]
        }
    )

    uri: ModelURI
    """Place of the weights: `hf://ORG/REPOSITORY`, `pvc://CLAIM/path`, or `file:///path/in/container`. The folder holds
    safetensors files with a `config.json`, or a GGUF file."""
    revision: Revision = "main"
    """Branch, tag or commit of an `hf://` repository. The operator asks once which commit a branch or tag is, and all
    workers load that one: see `status.model`."""
    follow_revision: Annotated[bool, Change.OPERATOR] = False
    """Replace the workers whenever the branch of `revision` has moved. Otherwise that is only reported."""
    served_name: Annotated[ServedName | None, Change.FOLLOWED] = None
    """What clients pass as `model`. Defaults to the object's name."""
    secret_ref: SecretKey | None = None
    """Access token for a private `hf://` repository."""
    cache: ModelCache | None = None
    """Volume in which downloads are kept. Without it every pod downloads into a volume of its own."""
