"""Images of models that name none: kept over upgrades, and followed by turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_objects import RELEASE, blueprint, settled
from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.status import ImagesStatus, RolloutStatus
from tandem_operator.objects.manifests import ChildKey, Manifest
from tandem_operator.rollout.images import ImagePlan, plan_images
from tandem_operator.workloads.release import Release

LATER = replace(RELEASE, worker_image="worker:2", gateway_image="gateway:2")
FOLLOWED = replace(LATER, follow_images=True)
KEPT = ImagesStatus(worker="worker:1", gateway="gateway:1", engine="Tandem")


def model(status: ImagesStatus | None = KEPT, **spec: Any) -> InferenceModel:
    made = blueprint(**spec).model
    return made.model_copy(update={"status": made.status.model_copy(update={"images": status})})


def planned(
    asked: InferenceModel, release: Release = LATER, *, live: dict[ChildKey, Manifest] | None = None, turn: bool = True
) -> ImagePlan:
    return plan_images(asked, release, live or {}, {}, may_follow=turn)


def test_a_new_model_gets_what_the_release_brings() -> None:
    found = planned(model(None))
    assert (found.worker, found.gateway, found.condition) == ("worker:2", "gateway:2", [])
    assert found.status == ImagesStatus(worker="worker:2", gateway="gateway:2", engine="Tandem")


def test_an_upgrade_changes_nothing_by_itself_and_says_what_it_would_bring() -> None:
    found = planned(model())
    assert (found.worker, found.gateway, found.status, found.waiting) == ("worker:1", "gateway:1", KEPT, False)
    (told,) = found.condition
    assert (told.status, told.reason) == ("False", "NewerRelease")
    assert "worker:2, gateway:2" in told.message


@pytest.mark.parametrize(
    ("release", "wish", "follows"),
    [(LATER, None, False), (FOLLOWED, None, True), (LATER, True, True), (FOLLOWED, False, False)],
)
def test_following_is_asked_for_by_the_model_or_the_chart(release: Release, wish: bool | None, follows: bool) -> None:
    found = planned(model(rollout={} if wish is None else {"followImage": wish}), release)
    assert (found.worker == "worker:2", found.gateway == "gateway:2") == (follows, follows)


def test_following_waits_for_the_turn() -> None:
    found = planned(model(), FOLLOWED, turn=False)
    assert (found.worker, found.gateway, found.waiting) == ("worker:1", "gateway:1", True)
    assert found.condition[0].reason == "WaitingForTurn"


def test_what_the_spec_names_is_nobody_elses_business() -> None:
    found = planned(model(engine={"image": "own:1"}, gateway={"image": "own:2"}))
    assert (found.status, found.condition) == (ImagesStatus(engine="Tandem"), [])


def test_an_image_that_the_spec_no_longer_names_is_not_kept() -> None:
    """A wrong image that is taken out of the spec again must not be found in what runs."""
    named = planned(model(None, engine={"image": "wrong:1"}, gateway={"image": "wrong:2"}), RELEASE)
    running = settled(blueprint(engine={"image": "wrong:1"}, gateway={"image": "wrong:2"}))
    found = planned(model(named.status), RELEASE, live=running)
    assert (found.worker, found.gateway, found.condition) == (RELEASE.worker_image, RELEASE.gateway_image, [])
    assert found.status == ImagesStatus(worker=RELEASE.worker_image, gateway=RELEASE.gateway_image, engine="Tandem")


def test_another_engine_gets_an_image_of_its_own() -> None:
    found = planned(model(engine={"kind": "VLLM"}))
    assert found.worker.startswith("vllm")
    assert found.gateway == "gateway:1"


def test_a_status_that_has_been_lost_is_found_again_in_revisions_and_in_what_runs() -> None:
    lost = model(None)
    found = planned(lost, live=settled(blueprint()))
    assert (found.worker, found.gateway) == ("worker:1", "gateway:1")
    state = RolloutStatus(revision=3, digest="", stable_revision=3)
    rolled = lost.model_copy(update={"status": lost.status.model_copy(update={"rollout": state})})
    kept = plan_images(rolled, LATER, {}, {3: {"engine": {"image": "worker:0"}}}, may_follow=True)
    assert kept.worker == "worker:0"


def test_pods_without_keys_are_of_a_release_that_this_one_cannot_speak_with() -> None:
    live = settled(blueprint())
    for name in (ChildKey("StatefulSet", "m-decode"), ChildKey("Deployment", "m")):
        spec = live[name]["spec"]["template"]["spec"]
        spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "keys"]
    found = planned(model(None), live=live)
    assert (found.worker, found.gateway) == ("worker:2", "gateway:2")
