from __future__ import annotations

from operator_objects import pod, stateful_set
from tandem_operator.kube.ownership import updates
from tandem_operator.kube.store import ChildStore, Kept
from tandem_operator.objects.manifests import CONFIG_MAP, POD, STATEFUL_SET, ChildKey, ModelKey

M = ModelKey("n", "m")


def test_children_come_back_whole_but_for_managed_fields() -> None:
    store = ChildStore()
    store.put(POD, pod("a", metadata={"managedFields": [{}]}, phase="Running"))
    (child,) = store.children(M).values()
    assert child["status"] == {"phase": "Running"}
    assert (child["kind"], child["apiVersion"]) == ("Pod", "v1")
    assert "managedFields" not in child["metadata"]


def test_what_is_taken_out_can_be_changed() -> None:
    store = ChildStore()
    store.put(POD, pod("a"))
    store.children(M)[ChildKey("Pod", "a")].clear()
    assert store.children(M)[ChildKey("Pod", "a")]


def test_a_list_removes_what_vanished() -> None:
    store = ChildStore()
    for name in ("a", "b"):
        store.put(POD, pod(name))
    store.put(CONFIG_MAP, pod("b"))
    assert store.retain(POD, "elsewhere", []) == set()
    assert store.retain(POD, None, [(M, "a")]) == {M}
    assert sorted(store.children(M)) == [ChildKey("ConfigMap", "b"), ChildKey("Pod", "a")]


def test_the_last_child_takes_the_model_with_it() -> None:
    store = ChildStore()
    assert store.put(POD, pod("a")) == Kept(M, is_news=True)
    assert store.remove(POD, pod("a")) == M
    assert store.models() == set()
    assert store.remove(POD, pod("a")) == M


def test_objects_without_a_model_are_ignored() -> None:
    stranger = {"metadata": {"name": "x", "namespace": "n"}}
    assert ChildStore().put(POD, stranger) is None


def test_only_what_is_kept_is_news() -> None:
    store, found = ChildStore(), pod("a", metadata={"resourceVersion": "1"}, phase="Pending")
    assert store.put(POD, found) == Kept(M, is_news=True)
    found["metadata"] |= {"resourceVersion": "2", "annotations": {"example.com/scraped": "now"}}
    assert store.put(POD, found) == Kept(M, is_news=False)
    found["metadata"]["annotations"] = {"tandem.dev/config-hash": "x"}
    assert store.put(POD, found) == Kept(M, is_news=True)
    found["status"]["phase"] = "Running"
    assert store.put(POD, found) == Kept(M, is_news=True)


def test_of_a_child_that_was_created_is_known_that_it_was() -> None:
    store = ChildStore()
    created = {"manager": "tandem-operator", "operation": "Update", "fieldsV1": {"f:spec": {}}}
    applied = created | {"operation": "Apply"}
    for managed, known in (([created, applied], True), ([applied], False)):
        store.put(CONFIG_MAP, pod("a", metadata={"managedFields": managed}))
        (child,) = store.children(M).values()
        assert bool(updates(child)) is known


def test_a_pod_that_was_evicted_is_remembered_until_one_of_its_name_is_ready() -> None:
    store = ChildStore()
    store.put(CONFIG_MAP, pod("m"))

    def seen(uid: str, **status: object) -> object:
        store.put(POD, pod("a", metadata={"uid": uid}, **status))
        return store.children(M)[ChildKey("Pod", "a")]["status"].get("endedBefore")

    assert seen("1", phase="Running") is None
    assert seen("1", phase="Failed", reason="Evicted", message="too much disk") is None
    store.remove(POD, pod("a", metadata={"uid": "1"}))
    assert seen("2", phase="Pending") == {
        "uid": "1", "reason": "Evicted", "message": "too much disk", "owner": "sts-uid",
    }  # fmt: skip
    assert seen("2", phase="Running") is not None
    ready = [{"type": "Ready", "status": "True"}]
    assert seen("2", phase="Running", conditions=ready) is None
    assert seen("3", phase="Pending") is None
    assert seen("3", phase="Succeeded") is None, "as an evicted pod that ends well"
    assert seen("4", phase="Pending") == {
        "uid": "3", "reason": "EndedByNode", "message": None, "owner": "sts-uid",
    }  # fmt: skip
    seen("4", phase="Running", conditions=ready)
    store.put(POD, pod("a", metadata={"uid": "4", "deletionTimestamp": "2026-01-01T00:00:00Z"}, phase="Succeeded"))
    assert seen("3", phase="Pending") is None, "somebody deleted it"
    seen("3", phase="Failed", reason="Evicted")
    store.remove(POD, pod("a", metadata={"uid": "3"}))
    store.remove(CONFIG_MAP, pod("m"))
    assert seen("4", phase="Pending") is None, "with the last child all is forgotten"


def owner_of(replicas: int) -> dict[str, object]:
    found = stateful_set(replicas=replicas)
    found["metadata"]["labels"] = {"tandem.dev/model": "m"}
    return found


def test_how_pods_ended_that_nobody_makes_again_is_forgotten() -> None:
    """Names of gateways' pods never come back, and a pod that is wanted years later did not end just now."""

    def evict(name: str, **metadata: object) -> None:
        store.put(POD, pod(name, metadata={"uid": "old", **metadata}, phase="Failed", reason="Evicted"))
        store.remove(POD, pod(name, metadata={"uid": "old"}))

    def remembers(name: str) -> bool:
        store.put(POD, pod(name, metadata={"uid": "new"}, phase="Pending"))
        found = store.children(M)[ChildKey("Pod", name)]["status"]
        store.remove(POD, pod(name, metadata={"uid": "new"}))
        return "endedBefore" in found

    store = ChildStore()
    store.put(CONFIG_MAP, pod("m"))
    store.put(STATEFUL_SET, owner_of(3))
    replica_set = [{"kind": "ReplicaSet", "name": "m-5d", "uid": "rs", "controller": True}]
    evict("m-5d-x", ownerReferences=replica_set)
    assert not remembers("m-5d-x")
    for name in ("m-decode-0", "m-decode-2", "m-decode-x"):
        evict(name)
    store.put(STATEFUL_SET, owner_of(2))
    assert [remembers(f"m-decode-{number}") for number in (0, 2, "x")] == [True, False, False]
    store.remove(STATEFUL_SET, owner_of(2))
    assert not remembers("m-decode-0")
    store.put(STATEFUL_SET, owner_of(2))
    evict("m-decode-1")
    store.retain(STATEFUL_SET, "n", [])
    assert not remembers("m-decode-1")


def test_a_child_whose_label_names_another_model_leaves_the_first_one() -> None:
    store, other = ChildStore(), ModelKey("n", "other")
    store.put(CONFIG_MAP, pod("a"))
    store.put(CONFIG_MAP, pod("b"))
    moved = pod("a")
    moved["metadata"]["labels"] = moved["metadata"]["labels"] | {"tandem.dev/model": "other"}
    assert store.put(CONFIG_MAP, moved) == Kept(other, is_news=True, left=M)
    assert (list(store.children(M)), list(store.children(other))) == (
        [ChildKey("ConfigMap", "b")],
        [ChildKey("ConfigMap", "a")],
    )
    assert store.put(CONFIG_MAP, moved) == Kept(other, is_news=False)


def test_a_child_that_has_lost_its_label_leaves_its_model() -> None:
    store, bare = ChildStore(), pod("a")
    store.put(CONFIG_MAP, pod("a"))
    del bare["metadata"]["labels"]["tandem.dev/model"]
    assert store.remove(CONFIG_MAP, bare) == M
    assert store.models() == set()
