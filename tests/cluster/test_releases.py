"""What the tests of upgrades begin with: trees of other releases, and what a later one makes of the same model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from e2e.cluster import ClusterError
from e2e.cluster.images.catalog import IMAGES, content_tag
from e2e.releases import ADDED_DEFAULT, ADDED_FIELD, ROOT, add_default, export, image_of, run_python

DIGESTS = """
import json
from operator_objects import blueprint, cases
from tandem_api.names import Role
from tandem_operator.rollout.revisions import content_of, digest_of
from tandem_operator.workloads import build_children
from tandem_operator.workloads.configs import start_hash, worker_config
found = {}
for name, case in sorted(cases().items()):
    plan = blueprint(**case)
    told = {str(role): worker_config(plan, role) for role in plan.worker_roles}
    found[name] = {
        "added": [getattr(c.scheduler, "lookahead", None) for c in told.values()],
        "starts": {role: start_hash(c) for role, c in told.items()},
        "revision": digest_of(content_of(plan)),
        "templates": [c["spec"]["template"] for c in build_children(plan) if "template" in c.get("spec", {})],
    }
print(json.dumps(found))
"""


def digests(tree: Path) -> dict[str, dict[str, object]]:
    return json.loads(run_python(tree, "-c", DIGESTS, paths=[ROOT / "tests" / "tandem_operator"]))


def test_a_release_that_adds_a_default_makes_the_same_pods(tmp_path: Path) -> None:
    """The same operator, with a field more in the model, in the launch configuration and in the CRD."""
    tree = add_default(tmp_path)
    now, later = digests(ROOT), digests(tree)
    for name, case in later.items():
        assert set(case.pop("added")) == {ADDED_DEFAULT}, "it is told to workers"  # pyright: ignore[reportArgumentType]
        assert set(now[name].pop("added")) == {None}  # pyright: ignore[reportArgumentType]
    assert later == now
    for crd in (tree / "crds", tree / "charts"):
        texts = [file.read_text() for file in crd.rglob("*inferencemodels*.yaml")]
        assert [f"{ADDED_FIELD}:\n" in text for text in texts] == [True], "the API server fills it in"


def test_a_release_of_the_history_is_exported_or_named(tmp_path: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    tree = export(commit.stdout.strip(), tmp_path)
    for image in IMAGES[:3]:
        other = image_of(image.part, tree, "before")
        assert other.name == f"{image.name}-before"
        assert set(image.sources) == set(other.sources), "all that its Dockerfile copies"
        assert len(content_tag(tree, other, {})) == 16
    with pytest.raises(ClusterError, match="--unshallow"):
        export("0" * 40, tmp_path)
