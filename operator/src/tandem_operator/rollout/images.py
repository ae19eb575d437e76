"""Which images a model gets that names none: from the status, from what runs, and from the release. Pure.

An image is chosen once, when workers or gateways are first made, and kept in status as the commit of the weights is: an
upgrade of the operator replaces nobody by itself. To follow is asked for, by the model or by the chart, and waits for
the model's turn among those that are rolled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.status import Condition, ImagesStatus, RolloutStatus
from tandem_api.engines import FOREIGN_ENGINES
from tandem_api.names import Role, workload_name

from tandem_operator.objects.manifests import DEPLOYMENT, STATEFUL_SET, ChildKey, Children, Manifest, dig, dig_list
from tandem_operator.rollout.revisions import History
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.release import Release

IMAGES_CURRENT = "ImagesCurrent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """What stands in for images that the spec does not name."""

    worker: str
    gateway: str
    status: ImagesStatus
    behind: tuple[str, ...] = ()
    """Images that the release would bring and the model does not have."""
    waiting: bool = False
    """They come when the model's turn does."""

    @property
    def condition(self) -> list[Condition]:
        """Nothing where the model has what the release brings, or names its images."""
        if not self.behind:
            return []
        brought = ", ".join(self.behind)
        if self.waiting:
            text = f"this release brings {brought}; they come when it is this model's turn (rollouts.maxConcurrent)"
            return [Condition(type=IMAGES_CURRENT, status="False", reason="WaitingForTurn", message=text)]
        text = (
            f"this release brings {brought}, and the model keeps what it has: set spec.rollout.followImage, or"
            " images.follow of the chart, to replace gateways and workers"
        )
        return [Condition(type=IMAGES_CURRENT, status="False", reason="NewerRelease", message=text)]


def plan_images(
    model: InferenceModel, release: Release, live: Children, history: History, *, may_follow: bool
) -> ImagePlan:
    """The images to use. `may_follow`: the turn to be replaced is this model's, if it asks for one."""
    spec = model.spec
    brought = _brought(model, release)
    known = _known(model, live, history)
    follows = release.follow_images if spec.rollout.follow_image is None else spec.rollout.follow_image
    wanted = {part: image for part, image in brought.items() if getattr(known, part) not in (None, image)}
    behind = () if follows and may_follow else tuple(wanted.values())
    kept = {part: str(getattr(known, part)) for part in wanted} if behind else {}
    has = brought | kept
    status = ImagesStatus(worker=has.get("worker"), gateway=has.get("gateway"), engine=spec.engine.kind)
    return ImagePlan(
        worker=has.get("worker", release.worker_image),
        gateway=has.get("gateway", release.gateway_image),
        status=status,
        behind=behind,
        waiting=bool(behind) and follows,
    )


def with_images(blueprint: Blueprint, plan: ImagePlan) -> Blueprint:
    """`blueprint` with images for what its spec does not name."""
    release = replace(blueprint.release, gateway_image=plan.gateway)
    return replace(blueprint, release=release, kept_image=plan.worker)


def _brought(model: InferenceModel, release: Release) -> dict[str, str]:
    """The release's images for what the spec does not name."""
    engine = model.spec.engine
    foreign = FOREIGN_ENGINES.get(engine.kind)
    found: dict[str, str] = {}
    if engine.image is None:
        found["worker"] = release.worker_image if foreign is None else foreign.image
    if model.spec.gateway.image is None:
        found["gateway"] = release.gateway_image
    return found


def _known(model: InferenceModel, live: Children, history: History) -> ImagesStatus:
    """What the model has. Where its status does not say, because an earlier release made it or it has been lost, its
    kept revisions do, or what runs. Where it says that there is none, the spec named an image until now: nobody asks
    for that one any more."""
    told, kind = model.status.images, model.spec.engine.kind
    if told is not None:
        return told if told.engine == kind else told.model_copy(update={"worker": None})
    worker = _of_history(model.status.rollout, history, kind)
    worker = worker or _of_workload(live.get(_key(model, model_role(model))), "worker", kind=kind)
    gateway = _of_workload(live.get(_key(model, Role.GATEWAY)), "gateway")
    return ImagesStatus(worker=worker, gateway=gateway, engine=kind)


def model_role(model: InferenceModel) -> Role:
    return Role.UNIFIED if model.spec.prefill is None else Role.DECODE


def _key(model: InferenceModel, role: Role) -> ChildKey:
    kind = DEPLOYMENT if role is Role.GATEWAY else STATEFUL_SET
    return ChildKey(kind.name, workload_name(model.metadata.name, role))


def _of_history(state: RolloutStatus | None, history: History, kind: str) -> str | None:
    content = None if state is None else history.get(state.stable_revision)
    if content is None or (dig(content, "engine", "kind") or "Tandem") != kind:
        return None
    image = dig(content, "engine", "image")
    return image if isinstance(image, str) else None


def _of_workload(workload: Manifest | None, container: str, *, kind: str = "Tandem") -> str | None:
    """What runs; None of a release whose pods have no keys, because this one cannot speak with them."""
    spec = dig(workload, "spec", "template", "spec")
    has_keys = any(volume.get("name") == "keys" for volume in dig_list(spec, "volumes"))
    if not has_keys or kind != "Tandem":
        return None
    images = (each.get("image") for each in dig_list(spec, "containers") if each.get("name") == container)
    return next((image for image in images if isinstance(image, str)), None)
