"""What a podTemplate may not ask for, as the API server judges it, and how gateways are reached from outside."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes import client

from e2e.suite.fleet import Fleet, Object, smollm2, until

WORKER = "spec.decode.podTemplate.spec.containers[worker].securityContext"


def container(context: Any = None, **fields: Any) -> Object:
    """A podTemplate that changes the main container of decode workers."""
    more = {} if context is None else {"securityContext": context}
    return {"spec": {"containers": [{"name": "worker"} | more | fields]}}


def pod(**spec: Any) -> Object:
    return {"spec": spec}


REFUSED: dict[str, tuple[Object, str]] = {
    "privileged": (container({"privileged": True}), f"{WORKER}.privileged must be false"),
    "escalation": (container({"allowPrivilegeEscalation": True}), f"{WORKER}.allowPrivilegeEscalation must be false"),
    "escalation-by-null": (container({"allowPrivilegeEscalation": None}), f"{WORKER}.allowPrivilegeEscalation"),
    "added-capability": (container({"capabilities": {"add": ["SYS_ADMIN"]}}), f"{WORKER}.capabilities.add must be"),
    "kept-capabilities": (container({"capabilities": {"drop": []}}), f"{WORKER}.capabilities.drop must hold ALL"),
    "capabilities-deleted": (container({"capabilities": {"$patch": "delete"}}), f"{WORKER}.capabilities.drop"),
    "capabilities-null": (container({"capabilities": None}), f"{WORKER}.capabilities.drop must hold ALL"),
    "context-deleted": (container({"$patch": "delete"}), f"{WORKER} must not be removed or replaced"),
    "root": (container({"runAsUser": 0}), f"{WORKER} must not let containers run as root"),
    "root-admitted": (container({"runAsNonRoot": False}), f"{WORKER} must not let containers run as root"),
    "seccomp": (container({"seccompProfile": {"type": "Unconfined"}}), f"{WORKER}.seccompProfile.type must be"),
    "apparmor": (container({"appArmorProfile": {"type": "Unconfined"}}), f"{WORKER}.appArmorProfile.type must be"),
    "proc": (container({"procMount": "Unmasked"}), f"{WORKER}.procMount must be Default"),
    "selinux": (container({"seLinuxOptions": {"type": "spc_t"}}), f"{WORKER}.seLinuxOptions may hold"),
    "windows": (container({"windowsOptions": {"hostProcess": True}}), f"{WORKER}.windowsOptions.hostProcess"),
    "host-port": (
        container(ports=[{"containerPort": 8000, "hostPort": 8000}]),
        "spec.decode.podTemplate.spec.containers[worker].ports must not hold a hostPort",
    ),
    "privileged-sidecar": (
        pod(containers=[{"name": "side", "image": "x", "securityContext": {"privileged": True}}]),
        "containers[side].securityContext.privileged must be false",
    ),
    "privileged-init": (
        pod(initContainers=[{"name": "tune", "image": "x", "securityContext": {"privileged": True}}]),
        "spec.decode.podTemplate.spec.initContainers[tune].securityContext.privileged must be false",
    ),
    "privileged-ephemeral": (
        pod(ephemeralContainers=[{"name": "debug", "image": "x", "securityContext": {"privileged": True}}]),
        "ephemeralContainers[debug].securityContext.privileged must be false",
    ),
    "host-network": (pod(hostNetwork=True), "spec.decode.podTemplate.spec.hostNetwork must be false"),
    "host-pid": (pod(hostPID=True), "spec.decode.podTemplate.spec.hostPID must be false"),
    "host-ipc": (pod(hostIPC=True), "spec.decode.podTemplate.spec.hostIPC must be false"),
    "host-path": (
        pod(volumes=[{"name": "tmp", "hostPath": {"path": "/"}}]),
        "spec.decode.podTemplate.spec.volumes must not hold a hostPath",
    ),
    "foreign-account": (pod(serviceAccountName="cluster-admin"), "serviceAccountName must be m-worker"),
    "default-account": (pod(serviceAccountName=None), "serviceAccountName must be m-worker"),
    "gateways-account": (pod(serviceAccountName="m-gateway"), "serviceAccountName must be m-worker"),
    "old-account": (pod(serviceAccount="cluster-admin"), "spec.serviceAccount must be m-worker"),
    "pod-context-null": (pod(securityContext=None), "podTemplate.spec.securityContext must not be removed"),
    "pod-root": (pod(securityContext={"runAsNonRoot": False}), "securityContext must not let containers run as root"),
    "pod-seccomp-null": (pod(securityContext={"seccompProfile": None}), "securityContext.seccompProfile.type must be"),
    "pod-sysctl": (
        pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
        "securityContext.sysctls may hold those alone that Kubernetes counts as safe",
    ),
    "spec-replaced": (
        {"spec": {"$patch": "replace", "containers": []}},
        "$patch would remove what keeps pods confined",
    ),
    "apparmor-annotation": (
        {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/worker": "unconfined"}}},
        "spec.decode.podTemplate.metadata.annotations must not switch AppArmor off",
    ),
}
ADMITTED: dict[str, Object] = {
    "environment": container(env=[{"name": "NCCL_DEBUG", "value": "INFO"}]),
    "places": pod(nodeSelector={"pool": "gpu"}, tolerations=[{"operator": "Exists"}], priorityClassName="serving"),
    "sidecar": pod(containers=[{"name": "side", "image": "x"}], volumes=[{"name": "data", "emptyDir": {}}]),
    "confined-sidecar": pod(
        initContainers=[
            {
                "name": "fetch",
                "image": "x",
                "securityContext": {
                    "privileged": False, "allowPrivilegeEscalation": False, "runAsNonRoot": True, "runAsUser": 1000,
                    "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
                },
            }
        ]
    ),
    "user": pod(securityContext={"runAsUser": 1000, "fsGroup": 1000, "supplementalGroups": [44]}),
    "port-range": pod(securityContext={"sysctls": [{"name": "net.ipv4.ip_local_port_range", "value": "1 9"}]}),
    "own-account": pod(serviceAccountName="m-worker", hostNetwork=False),
    "ports": container(ports=[{"containerPort": 9999}]),
    "volume-removed": pod(volumes=[{"name": "tmp", "$patch": "delete"}]),
    "labels": {"metadata": {"labels": {"team": "search"}, "annotations": {"example.com/a": "b"}}},
}  # fmt: skip
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
RBAC = "rbac.authorization.k8s.io"
GATEWAY_ROLE = "tandem-tandem-system-gateway"


def model(**spec: Any) -> Object:
    return smollm2("m", **{"suspend": True} | spec)


def with_template(role: str, template: Object) -> Object:
    manifest = model()
    manifest["spec"][role] = manifest["spec"].get(role, {}) | {"podTemplate": template}
    return manifest


def create(fleet: Fleet, manifest: Object) -> str | None:
    """The API server's words where it refuses; nothing is kept."""
    try:
        fleet.kubernetes.request("POST", fleet.path("inferencemodels") + "?dryRun=All", manifest)
    except client.ApiException as error:
        if error.body is None:
            raise
        return json.loads(error.body)["message"]
    return None


def test_pod_templates_are_kept_from_privileges(fleet: Fleet) -> None:
    """The policy is in force some moments after it was made: the first refusal is waited for."""
    until(
        "the policy to hold",
        lambda: create(fleet, with_template("decode", REFUSED["privileged"][0])) is not None,
        within=60,
    )
    for name, (template, says) in REFUSED.items():
        refused = create(fleet, with_template("decode", template))
        assert refused is not None, f"{name} was admitted"
        assert "ValidatingAdmissionPolicy 'tandem-tandem-system-pod-templates'" in refused, name
        assert says in refused, f"{name}: {refused}"

    for name, template in ADMITTED.items():
        assert create(fleet, with_template("decode", template)) is None, name
    for role, account in (("prefill", "m-worker"), ("decode", "m-worker"), ("gateway", "m-gateway")):
        refused = create(fleet, with_template(role, pod(hostNetwork=True, serviceAccountName="other")))
        assert f"spec.{role}.podTemplate.spec.hostNetwork must be false; " in str(refused), "everything wrong is named"
        assert f"spec.{role}.podTemplate.spec.serviceAccountName must be {account}" in str(refused)


def test_a_model_from_before_the_policy_can_be_annotated_and_deleted(fleet: Fleet) -> None:
    """The binding is taken away for a moment: what is admitted then stays changeable but for its spec."""
    path = f"{ADMISSION}/validatingadmissionpolicybindings/tandem-tandem-system-pod-templates"
    binding = fleet.kubernetes.request("GET", path)
    offending = with_template("decode", pod(hostNetwork=True))
    fleet.kubernetes.request("DELETE", path)
    try:
        until("the policy to let go", lambda: create(fleet, offending) is None, within=60)
        fleet.apply(offending)
    finally:
        kept = {key: binding["metadata"][key] for key in ("name", "labels", "annotations")}
        body = {"apiVersion": binding["apiVersion"], "kind": binding["kind"], "metadata": kept, "spec": binding["spec"]}
        fleet.kubernetes.request("POST", path.rsplit("/", 1)[0], body)
    another = offending | {"metadata": {"name": "n"}}  # one that is there already is refused for that alone
    until("the policy to hold", lambda: create(fleet, another) is not None, within=60)
    fleet.annotate("m", {"example.com/note": "seen"})
    with pytest.raises(client.ApiException):
        fleet.patch("m", {"drain": {"timeout": "77s"}})
    fleet.delete("inferencemodels", "m")
    until("the model to be gone", lambda: not fleet.exists("inferencemodels", "m"), within=60)


def test_the_operator_may_not_write_roles(fleet: Fleet) -> None:
    """It binds gateways to one ClusterRole, and may bind no other."""

    def may(verb: str, resource: str, name: str = "") -> bool:
        return fleet.may("tandem-system:tandem", verb, resource, group=RBAC, name=name)

    assert not any(may(verb, "roles") for verb in ("create", "update", "patch", "escalate", "bind"))
    assert may("bind", "clusterroles", GATEWAY_ROLE)
    assert not may("bind", "clusterroles", "cluster-admin")


def test_gateways_get_their_rights_by_a_binding_and_those_of_earlier_releases_go(fleet: Fleet) -> None:
    live = fleet.apply(model())
    (binding,) = until("the gateway to be bound", lambda: fleet.find("rolebindings", "tandem.dev/model=m"), within=60)
    assert binding["roleRef"]["name"] == GATEWAY_ROLE
    gateway = f"{fleet.namespace}:m-gateway"
    until("the API server to know of it", lambda: fleet.may(gateway, "watch", "pods"), within=60)
    assert fleet.may(gateway, "watch", "inferencemodels", group="tandem.dev")
    assert not fleet.may(gateway, "get", "secrets")
    assert not fleet.may(f"{fleet.namespace}:m-worker", "list", "pods")
    owner = {
        "apiVersion": live["apiVersion"], "kind": live["kind"], "name": "m", "uid": live["metadata"]["uid"],
        "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip
    metadata = {"name": "m-gateway", "labels": binding["metadata"]["labels"], "ownerReferences": [owner]}
    api_version = f"{RBAC}/v1"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    fleet.kubernetes.request(
        "POST", fleet.path("roles"), {"apiVersion": api_version, "kind": "Role", "metadata": metadata, "rules": rules}
    )
    former = {"apiGroup": RBAC, "kind": "Role", "name": "m-gateway"}
    fleet.kubernetes.request(
        "POST",
        fleet.path("rolebindings"),
        {"apiVersion": api_version, "kind": "RoleBinding", "metadata": metadata, "roleRef": former}
        | {"subjects": binding["subjects"]},
    )
    until("the former Role to go", lambda: not fleet.find("roles", "tandem.dev/model=m"), within=60)
    until("its binding to go", lambda: len(fleet.find("rolebindings", "tandem.dev/model=m")) == 1, within=60)
    assert fleet.may(gateway, "watch", "pods")


def test_the_service_changes_its_type_in_place(fleet: Fleet) -> None:
    fleet.apply(model(gateway={"service": {"type": "NodePort", "annotations": {"example.com/a": "b"}}}))

    def service(kind: str) -> Object | None:
        found = fleet.get("services", "m")
        return found if found["spec"]["type"] == kind else None

    made = until("a Service of type NodePort", lambda: service("NodePort"), within=60)
    assert made["spec"]["ports"][0]["nodePort"]
    assert made["metadata"]["annotations"]["example.com/a"] == "b"
    fleet.apply(model())
    plain = until("a Service of type ClusterIP", lambda: service("ClusterIP"), within=60)
    assert plain["spec"]["clusterIP"] == made["spec"]["clusterIP"]
    assert "nodePort" not in plain["spec"]["ports"][0]
    assert "example.com/a" not in plain["metadata"]["annotations"]
    refused = create(fleet, model(gateway={"service": {"nodePort": 30000}}))
    assert "spec.gateway.service.nodePort" in str(refused)


@pytest.mark.parametrize(
    ("cors", "sentence"),
    [
        ({"allowOrigins": ["*"], "allowCredentials": True}, "must name the origins where allowCredentials is true"),
        ({"allowOrigins": ["https://a.example.com:443"]}, "must not have the port that its scheme implies"),
        ({"allowOrigins": ["a.example.com"]}, "must be * or an origin"),
        ({"allowOrigins": []}, "spec.gateway.cors.allowOrigins"),
    ],
)
def test_origins_that_browsers_would_not_take_are_refused(fleet: Fleet, cors: Object, sentence: str) -> None:
    assert sentence in str(create(fleet, model(gateway={"cors": cors})))
    assert create(fleet, model(gateway={"cors": {"allowOrigins": ["https://a.example.com"]}})) is None


@pytest.mark.parametrize(
    ("gateway", "sentence"),
    [
        ({"replicas": 2, "responseStore": {"maxBytes": "1Mi"}}, "must not be more than 1 while responseStore is set"),
        ({"responseStore": {"maxBytes": "512Ki"}}, "must be between 1Mi and 256Mi"),
        ({"responseStore": {"maxBytes": "257Mi"}}, "must be between 1Mi and 256Mi"),
        ({"responseStore": {"maxBytes": "64Mi", "ttl": "0s"}}, "must be at least 1s"),
        (
            {"resources": {"limits": {"memory": "255Mi"}}, "responseStore": {"maxBytes": "64Mi"}},
            "must not be more than a quarter of resources.limits.memory",
        ),
    ],
)
def test_a_store_of_responses_that_has_no_room_is_refused(fleet: Fleet, gateway: Object, sentence: str) -> None:
    assert sentence in str(create(fleet, model(gateway=gateway)))


@pytest.mark.parametrize("memory", [None, "256Mi", "1Gi"])
def test_a_store_of_responses_is_admitted(fleet: Fleet, memory: str | None) -> None:
    limits = {} if memory is None else {"resources": {"limits": {"memory": memory}}}
    assert create(fleet, model(gateway={"responseStore": {"maxBytes": "64Mi"}} | limits)) is None


def test_a_route_without_the_gateway_api_is_told_and_holds_nothing_up(fleet: Fleet) -> None:
    groups = fleet.kubernetes.request("GET", "/apis")["groups"]
    if any(group["name"] == "gateway.networking.k8s.io" for group in groups):
        pytest.skip("the cluster has the Gateway API")
    fleet.apply(model(gateway={"httpRoute": {"parentRefs": [{"name": "public"}]}}))

    def told() -> bool:
        stalled = fleet.condition("m", "Stalled")
        return stalled is not None and stalled["reason"] == "GatewayAPIMissing"

    until("the missing Gateway API to be named", told, within=60)
    assert fleet.exists("services", "m")
    assert fleet.exists("deployments", "m")
    fleet.apply(model())
    until("the model to recover", lambda: not told(), within=60)


@pytest.mark.parametrize(
    ("speculative", "sentence"),
    [
        ({"method": "Lookup", "draft": {"uri": "hf://a/b"}}, "method Lookup guesses without one"),
        ({"method": "Auto", "draft": {"uri": "s3://a/b"}}, "must be hf://ORGANIZATION/REPOSITORY"),
        ({"method": "Auto", "draft": {"uri": "file:///a", "revision": "b"}}, "of an hf:// repository"),
        ({"method": "Auto", "draft": {"uri": "file:///a", "secretRef": {"name": "b"}}}, "of an hf:// repository"),
    ],
)
def test_heads_that_nobody_could_ask_are_refused(fleet: Fleet, speculative: Object, sentence: str) -> None:
    assert sentence in str(create(fleet, model(engine={"speculative": speculative})))
    head = {"uri": "hf://a/b", "revision": "abc"}
    assert create(fleet, model(engine={"speculative": {"method": "Draft", "draft": head}})) is None
    assert create(fleet, model(engine={"speculative": {"method": "Draft"}})) is None, "the model may bring a head"


@pytest.mark.parametrize(
    ("kv", "spec", "sentence"),
    [
        ({"hostMemory": "64Gi"}, {"engine": {"device": "CPU"}}, "is for workers on GPUs"),
        ({"hostMemory": "1Mi"}, {}, "must be at least 64Mi"),
        ({"hostMemory": "64Gi", "disk": {"size": "64Gi"}}, {}, "must be larger than kv.hostMemory"),
        (
            {"hostMemory": "64Gi"},
            {"decode": {"replicas": 1, "resources": {"limits": {"memory": "64Gi"}}}},
            "must be less than the memory limit of each worker role",
        ),
        (
            {"hostMemory": "64Gi"},
            {"prefill": {"replicas": 1, "parallelism": {"tensor": 2}, "resources": {"limits": {"memory": "100Gi"}}}},
            "must be less than the memory limit of each worker role",
        ),
    ],
)
def test_host_memory_that_is_of_no_use_or_does_not_fit_is_refused(
    fleet: Fleet, kv: Object, spec: Object, sentence: str
) -> None:
    refused = model(kv=kv)
    refused["spec"] |= spec
    assert sentence in str(create(fleet, refused))
    taken = model(kv={"hostMemory": "64Gi", "disk": {"size": "65Gi"}}, engine={"device": "CUDA"})
    taken["spec"]["decode"] = {"replicas": 0, "resources": {"limits": {"memory": "65Gi"}}}
    assert create(fleet, taken) is None
