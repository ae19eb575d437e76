"""NetworkPolicies, one for each kind of pod: what may connect to it, and what it may connect to.

Two workers of one model meet where key-value blocks move, from decode to prefill workers, and between all of them where
they give each other their blocks, and within a replica of several pods. Gateways ask decode workers, and read what
every worker tells about itself. Nobody else needs either, but for clients and for who collects metrics.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from tandem_api import names
from tandem_api.names import Role

from tandem_operator.objects.manifests import NETWORK_POLICY, Manifest
from tandem_operator.workloads.blueprint import Blueprint, component_of, gives_blocks, shares_files
from tandem_operator.workloads.child import build_child, build_selector
from tandem_operator.workloads.configs import tracing
from tandem_operator.workloads.engines import is_foreign
from tandem_operator.workloads.gateway import client_ports
from tandem_operator.workloads.prewarm import COMPONENT
from tandem_operator.workloads.store import COMPONENT as STORE
from tandem_operator.workloads.store import build_store, master_address, master_name
from tandem_operator.workloads.transports import may_use_mooncake

METRICS_NAMESPACE_LABEL = f"{names.GROUP}/metrics"
"""Pods of a namespace labelled so (value `allowed`) may reach the metrics ports."""
_NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"
_EPHEMERAL_PORTS = (32768, 60999)
"""The ports where gloo and NCCL listen: they let the kernel choose, and this is what a new network namespace chooses
from."""
_DNS_PORTS = (53, 5353)
"""5353 is where OpenShift's DNS pods listen: most networks judge a connection by the pod behind the Service."""
_HTTPS_PORT = 443


def build_network_policies(blueprint: Blueprint) -> list[Manifest]:
    """One policy for each worker role, and one for the gateway; none where the release has them switched off."""
    if not blueprint.release.network.enabled:
        return []
    return [
        *(_build_worker_policy(blueprint, role) for role in blueprint.worker_roles),
        _build_gateway_policy(blueprint),
        *_build_master_policy(blueprint),
    ]


def _build_worker_policy(blueprint: Blueprint, role: Role) -> Manifest:
    foreign = is_foreign(blueprint)
    ingress = [_metrics_rule(names.WORKER_HTTP_PORT if foreign else names.WORKER_METRICS_PORT)]
    egress = [_DNS_RULE]
    ingress.append(_from(blueprint, component_of(Role.GATEWAY), _gateway_ports(blueprint, role)))
    if foreign and role is not Role.UNIFIED:
        # Both ends of NIXL listen at ports that the kernel chooses, besides the one where they meet.
        peer = component_of(Role.DECODE if role is Role.PREFILL else Role.PREFILL)
        ingress.append(_from(blueprint, peer, []))
        egress.append(_to(blueprint, peer, []))
    for other in () if foreign else blueprint.worker_roles:
        if _asks(blueprint, other, role):
            ingress.append(_from(blueprint, component_of(other), [_kv_ports(blueprint, role)]))
        if _asks(blueprint, role, other):
            egress.append(_to(blueprint, component_of(other), [_kv_ports(blueprint, other)]))
    if not foreign and may_use_mooncake(blueprint):
        if role is Role.PREFILL:
            egress.append(_to(blueprint, component_of(Role.DECODE), [_tcp(*names.MOONCAKE_PORTS)]))
        elif role is Role.DECODE:  # it asks nobody who he is: this rule is all that keeps others out
            ingress.append(_from(blueprint, component_of(Role.PREFILL), [_tcp(*names.MOONCAKE_PORTS)]))
    if not foreign and blueprint.model.spec.model.uri.startswith("hf://") and shares_files(blueprint):
        # Of both roles, while they start and when they serve: who has a part of the model's files gives it to others.
        for other in blueprint.worker_roles:
            ingress.append(_from(blueprint, component_of(other), [_tcp(names.WORKER_FILES_PORT)]))
            egress.append(_to(blueprint, component_of(other), [_tcp(names.WORKER_FILES_PORT)]))
    more_in, more_out = _store_rules(blueprint)
    ingress, egress = ingress + more_in, egress + more_out
    if blueprint.worker_spec(role).nodes_per_replica > 1:
        # Ranks meet at the leader's group port and then connect to each other at ports that the kernel chooses.
        group = [_tcp(names.WORKER_GROUP_PORT), _tcp(*_EPHEMERAL_PORTS)]
        ingress.append(_from(blueprint, component_of(role), group))
        egress.append(_to(blueprint, component_of(role), group))
    egress += _hub_rules(blueprint) + _tracing_rules(blueprint)
    return _build_policy(blueprint, role, ingress=ingress, egress=egress)


def _store_rules(blueprint: Blueprint) -> tuple[list[Manifest], list[Manifest]]:
    """What holders of a store take and ask: blocks of each other, and the master who has what. Where many models share
    a master, their blocks lie in each other's holders, which are workers of the same namespace. What is on a holder's
    disk is asked for at a port that the kernel chooses: by models that share its master too, with disks or without."""
    store, master = blueprint.model.spec.kv.store, master_address(blueprint)
    if store is None or master is None:
        return [], []
    memory, disk = _tcp(*names.STORE_DATA_PORTS), _tcp(*_EPHEMERAL_PORTS)
    data = [memory] if store.disk is None else [memory, disk]
    if store.master is not None:
        others = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "tandem"}}}
        return [{"from": [others], "ports": data}], [
            {"to": [others], "ports": [memory, disk]},
            *(rule for url in _master_urls(master) for rule in _outside(blueprint, url)),
        ]
    components = [component_of(role) for role in blueprint.worker_roles]
    return [_from(blueprint, component, data) for component in components], [
        *(_to(blueprint, component, data) for component in components),
        _to(blueprint, STORE, [_tcp(names.STORE_MASTER_PORT)]),
    ]


def _master_urls(master: str) -> list[str]:
    """URLs at which the master is asked. One that etcd knows is taken to listen, wherever it is, at the port that ours
    has."""
    scheme, found, rest = master.rpartition("://")
    if not found:
        return [f"//{rest}"]
    assert scheme == "etcd", "the API server refuses others"
    return [*(f"//{each}" for each in rest.split(";")), f"//0.0.0.0:{names.STORE_MASTER_PORT}"]


def _build_master_policy(blueprint: Blueprint) -> list[Manifest]:
    """The model's own master is asked by its workers, and asks nobody."""
    if not build_store(blueprint):
        return []
    ingress = [_from(blueprint, component_of(role), [_tcp(names.STORE_MASTER_PORT)]) for role in blueprint.worker_roles]
    return [_build(blueprint, master_name(blueprint), STORE, None, ingress=ingress, egress=[])]


def build_prewarm_policy(blueprint: Blueprint) -> Manifest | None:
    """The policy of pods that fill the cache: they reach the hub, nobody reaches them. None where policies are off."""
    if not blueprint.release.network.enabled:
        return None
    name = f"{blueprint.name}-{COMPONENT}"
    egress = [_DNS_RULE, *_hub_rules(blueprint)]
    return _build(blueprint, name, COMPONENT, None, ingress=[], egress=egress)


def _build_gateway_policy(blueprint: Blueprint) -> Manifest:
    api_server = {"ports": [_tcp(port) for port in blueprint.release.network.api_server_ports]}
    workers = [_to(blueprint, component_of(role), _gateway_ports(blueprint, role)) for role in blueprint.worker_roles]
    ingress = [
        {"ports": [_tcp(port.target) for port in client_ports(blueprint)]},
        _metrics_rule(names.GATEWAY_METRICS_PORT),
    ]
    if (namespace := blueprint.release.network.operator_namespace) is not None:
        # The operator reads what gateways report of their workers.
        source = {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME_LABEL: namespace}}}
        ingress.append({"from": [source], "ports": [_tcp(names.GATEWAY_METRICS_PORT)]})
    return _build_policy(
        blueprint,
        Role.GATEWAY,
        ingress=ingress,
        egress=[_DNS_RULE, api_server, *workers, *_tracing_rules(blueprint)],
    )


def _build_policy(blueprint: Blueprint, role: Role, *, ingress: list[Manifest], egress: list[Manifest]) -> Manifest:
    name = names.workload_name(blueprint.name, role)
    return _build(blueprint, name, component_of(role), role, ingress=ingress, egress=egress)


def _build(
    blueprint: Blueprint,
    name: str,
    component: str,
    role: Role | None,
    *,
    ingress: list[Manifest],
    egress: list[Manifest],
) -> Manifest:
    spec: Manifest = {
        "podSelector": {"matchLabels": build_selector(blueprint, component)},
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    if blueprint.release.network.egress:
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
    return build_child(blueprint, NETWORK_POLICY, name, {"spec": spec}, component=component, role=role)


def _gateway_ports(blueprint: Blueprint, role: Role) -> list[Manifest]:
    """What gateways reach of a worker: requests go to those that decode, and of a model that sleeps now and then orders
    to wake up to all; telemetry is read from all. Other engines' get requests whatever they do, and have no other port.
    """
    if is_foreign(blueprint):
        return [_tcp(names.WORKER_HTTP_PORT)]
    wakes = blueprint.model.spec.scale_to_zero is not None
    asked = [_tcp(names.WORKER_HTTP_PORT)] if wakes or role is not Role.PREFILL else []
    return [*asked, _tcp(names.WORKER_METRICS_PORT)]


def _asks(blueprint: Blueprint, role: Role, other: Role) -> bool:
    """Whether workers of `role` connect to the KV ports of those of `other`: to order prompts, or for blocks that they
    have computed."""
    if (role, other) == (Role.DECODE, Role.PREFILL):
        return True
    return gives_blocks(blueprint, role) and gives_blocks(blueprint, other)


def _kv_ports(blueprint: Blueprint, role: Role) -> Manifest:
    """The KV port of every rank of a pod of this role."""
    ranks = blueprint.worker_spec(role).ranks_per_pod
    return _tcp(names.WORKER_KV_PORT, names.WORKER_KV_PORT + ranks - 1)


def _hub_rules(blueprint: Blueprint) -> list[Manifest]:
    """Rules for where workers download from. A policy knows no names, and hubs send downloads on to others: the ports
    are open to everywhere. A hub inside the cluster is reached at whatever port its pods have, so its namespace is."""
    spec = blueprint.model.spec
    head = spec.engine.speculative.head
    if not any(source.uri.startswith("hf://") for source in (spec.model, head) if source is not None):
        return []
    return _outside(blueprint, blueprint.release.hub_endpoint or f"https://:{_HTTPS_PORT}", _HTTPS_PORT)


def _tracing_rules(blueprint: Blueprint) -> list[Manifest]:
    """The collector of spans, where they go to one."""
    wanted = tracing(blueprint)
    return [] if wanted is None else _outside(blueprint, wanted.endpoint)


def _outside(blueprint: Blueprint, url: str, *more: int) -> list[Manifest]:
    """What has this URL, whose port, and `more`, are open to everywhere; inside the cluster all of its namespace."""
    endpoint = urlsplit(url)
    port = endpoint.port or {"http": 80}.get(endpoint.scheme, _HTTPS_PORT)
    rules: list[Manifest] = [{"ports": [_tcp(port) for port in dict.fromkeys((*more, port))]}]
    if (namespace := _namespace_of(endpoint.hostname or "", blueprint.model.metadata.namespace)) is not None:
        rules.append({"to": [{"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME_LABEL: namespace}}}]})
    return rules


def _namespace_of(host: str, own: str) -> str | None:
    """The namespace of a Service by its name in DNS, as `NAME` or `NAME.NAMESPACE.svc…`; None for other hosts."""
    match host.split("."):
        case [name] if name and ":" not in name:
            return own
        case [_, namespace, "svc", *_]:
            return namespace
        case _:
            return None


def _metrics_rule(port: int) -> Manifest:
    scrapers = {"namespaceSelector": {"matchLabels": {METRICS_NAMESPACE_LABEL: "allowed"}}}
    return {"from": [scrapers], "ports": [_tcp(port)]}


def _from(blueprint: Blueprint, component: str, ports: list[Manifest]) -> Manifest:
    """Without `ports` all of them."""
    return {"from": [{"podSelector": {"matchLabels": build_selector(blueprint, component)}}]} | _at(ports)


def _to(blueprint: Blueprint, component: str, ports: list[Manifest]) -> Manifest:
    return {"to": [{"podSelector": {"matchLabels": build_selector(blueprint, component)}}]} | _at(ports)


def _at(ports: list[Manifest]) -> Manifest:
    return {"ports": ports} if ports else {}


def _tcp(first: int, last: int | None = None) -> Manifest:
    """One port, or all from `first` to `last`."""
    return {"port": first, "protocol": "TCP"} | ({"endPort": last} if last is not None and last > first else {})


_DNS_RULE: Manifest = {
    "ports": [{"port": port, "protocol": protocol} for port in _DNS_PORTS for protocol in ("UDP", "TCP")]
}
"""To anywhere: DNS may be pods of any namespace, or an address of the node."""
