"""The gateway: what clients meet, where it listens, what it observes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tandem_api.changes import Change
from tandem_api.crd.authored import Authored
from tandem_api.crd.fields import (
    Annotations,
    ClientTimeout,
    Duration,
    Hostname,
    Image,
    ObjectName,
    Quantity,
    Selector,
    unreserved,
)
from tandem_api.crd.pods import Resources, Workload
from tandem_api.launch import TLSVersion
from tandem_api.validation import RULES_KEY, Matches, Satisfies, rule


class Timeouts(Authored):
    first_token: ClientTimeout = "300s"
    """How long a client may wait for the first token."""
    idle: ClientTimeout = "60s"
    """How long a worker may be silent inside an answer."""
    answer: ClientTimeout = "600s"
    """How long an answer in one piece may take: unlike a stream it shows no sign of life before it is complete."""


class Queue(Authored):
    max: Annotated[int, Field(ge=0, le=8192)] = 1000
    """Requests that may wait at once in each gateway; further ones are answered 503. 0: nobody waits."""
    ttl: Duration | None = None
    """How long a request may wait for a worker before it is answered 503. `0s`: nobody waits. Defaults to `30s`, and to
    `10m` with `autoscaling.scaleToZero`, where the first request waits for a start."""


class GatewayService(Authored):
    """The Service in front of the gateways."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.nodePort) || self.type != 'ClusterIP'",
                    "is for a type of NodePort or LoadBalancer: remove it, or change type",
                    path=".nodePort",
                    server_only=True,
                ),
                rule(
                    "!has(self.externalTrafficPolicy) || self.type != 'ClusterIP'",
                    "is for a type of NodePort or LoadBalancer: remove it, or change type",
                    path=".externalTrafficPolicy",
                    server_only=True,
                ),
                rule(
                    "!has(self.loadBalancerClass) || self.type == 'LoadBalancer'",
                    "is for a type of LoadBalancer: remove it, or change type",
                    path=".loadBalancerClass",
                    server_only=True,
                ),
                unreserved("labels"),
                unreserved("annotations"),
            ]
        }
    )

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Whoever reaches the Service may use the model: gateways ask clients for no key."""
    annotations: Annotations = Field(default_factory=dict)
    """Added to the Service, for example for a cloud's load balancer."""
    labels: Selector = Field(default_factory=dict)
    """Added to the Service."""
    load_balancer_class: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Which implementation of load balancers is meant. Kubernetes does not let it change while the type stays."""
    node_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of every node, in the range that the cluster has for them. Chosen by Kubernetes where nothing is said."""
    external_traffic_policy: Literal["Cluster", "Local"] | None = None
    """`Local` keeps the client's address and uses gateways of the node that was reached alone."""


class ParentReference(Authored):
    name: ObjectName
    """A Gateway, of the Gateway API."""
    namespace: ObjectName | None = None
    """Defaults to the model's."""
    section_name: ObjectName | None = None
    """One of its listeners. Defaults to all that admit the route."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of its listeners. Defaults to all."""
    group: Annotated[str, Field(max_length=253)] | None = None
    """The API group of a parent that is not a Gateway."""
    kind: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """The kind of a parent that is not a Gateway."""


class HTTPRoute(Authored):
    """A route of the Gateway API to the Service."""

    model_config = ConfigDict(json_schema_extra={RULES_KEY: [unreserved("labels"), unreserved("annotations")]})

    parent_refs: Annotated[list[ParentReference], Field(min_length=1, max_length=16)]
    """Gateways that the route is attached to. They must admit routes of the model's namespace."""
    hostnames: Annotated[list[Hostname], Field(max_length=16)] = Field(default_factory=list[str])
    """Hosts whose requests are meant. Defaults to those of the listener."""
    annotations: Annotations = Field(default_factory=dict)
    """Added to the route."""
    labels: Selector = Field(default_factory=dict)
    """Added to the route."""
    timeouts: Literal["Disabled", "Unset"] = "Disabled"
    """`Disabled` writes timeouts of `0s`, which mean none: a long stream is not cut, and `gateway.timeouts` ends what
    is stuck. `Unset` writes nothing, for a Gateway API older than 1.2 or an implementation that refuses the field; many
    of them then cut streams after 15 to 60 seconds."""


Origin = Annotated[
    str,
    Matches(
        r"[*]|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?",
        "must be * or an origin in lower case, without a path: https://app.example.com or http://localhost:3000",
    ),
    Satisfies(
        "!(self.startsWith('https://') && self.endsWith(':443'))"
        " && !(self.startsWith('http://') && self.endsWith(':80'))",
        "must not have the port that its scheme implies: browsers leave it out",
    ),
    Field(max_length=253),
]
HeaderName = Annotated[
    str,
    Matches("[A-Za-z0-9!#$%&'+.^_`|~-]+", "must be the name of a header, for example authorization"),
    Field(max_length=128),
]


class CORS(Authored):
    """Which web pages of other origins may read the gateway's answers (the CORS protocol of the Fetch standard)."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.allowCredentials) || !self.allowCredentials || !('*' in self.allowOrigins)",
                    "must name the origins where allowCredentials is true: browsers take no * then",
                    path=".allowOrigins",
                    server_only=True,
                )
            ]
        }
    )

    allow_origins: Annotated[list[Origin], Field(min_length=1, max_length=32)]
    """Origins of the pages, for example `https://app.example.com`; `*` is any."""
    allow_headers: Annotated[list[HeaderName], Field(max_length=64)] = Field(default_factory=list[str])
    """Request headers that pages may send beside those that need no leave. Defaults to whatever a page asks for, as
    clients in browsers send many of their own."""
    allow_credentials: bool = False
    """Pages may send cookies and the like, for a proxy in front: the gateway asks for none itself."""
    max_age: Duration = "10m"
    """How long a browser may go by the answer to its question before it asks again."""


class GatewayTLS(Authored):
    """TLS between clients and gateways. Port 443 of the Service speaks it, and port 80 is gone unless `plainHttp`."""

    secret_name: ObjectName
    """A Secret of type `kubernetes.io/tls` in the model's namespace: `tls.crt` has the certificate and those that lead
    to its root, `tls.key` the key. A new certificate in it holds within about two minutes and restarts nothing."""
    min_version: TLSVersion = "TLS1.2"
    """Clients that speak older versions only are refused."""
    plain_http: bool = False
    """Port 80 stays, without TLS: for what is inside of the cluster, or an HTTPRoute."""


_ONE_GATEWAY = (
    "must not be more than 1 while responseStore is set, because each gateway keeps its own responses and a client's"
    " next request may reach another: write 1, or remove responseStore"
)
_STORE_TOO_LARGE = (
    "must not be more than a quarter of resources.limits.memory, because requests need the rest: raise the limit, or"
    " write less"
)
_STORE_LIMIT = "256Mi"
"""Half of what a gateway holds for clients at most (`launch.MAX_HELD_BYTES`)."""
_STORE_BYTES = "string(self.responseStore.maxBytes)"
_STORE = f"quantity({_STORE_BYTES})"


class ResponseStore(Authored):
    """Responses that the gateway keeps in memory, so that clients continue them by `previous_response_id`."""

    max_bytes: Annotated[
        Quantity,
        Satisfies(
            "!isQuantity(string(self)) || (quantity(string(self)).compareTo(quantity('1Mi')) >= 0"
            f" && quantity(string(self)).compareTo(quantity('{_STORE_LIMIT}')) <= 0)",
            f"must be between 1Mi and {_STORE_LIMIT}",
        ),
    ]
    """What they may take of the gateway's memory, all together: at most 256Mi, and a quarter of
    `gateway.resources.limits` where that has `memory`."""
    ttl: ClientTimeout = "1h"
    """How long each is kept after it was made. It goes earlier where others need its room."""


class GatewayScaling(Authored):
    mode: Literal["Static", "External"] = "Static"
    """`Static`: `replicas` does. `External`: whoever scales the Deployment does, for example a HorizontalPodAutoscaler;
    the operator then leaves its number alone, but for a suspension."""


class Gateway(Workload):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule("!has(self.responseStore) || self.replicas <= 1", _ONE_GATEWAY, path=".replicas"),
                rule(
                    "!has(self.responseStore) || !has(self.scaling) || !has(self.scaling.mode)"
                    " || self.scaling.mode == 'Static'",
                    _ONE_GATEWAY,
                    path=".scaling.mode",
                ),
                rule(
                    "!has(self.responseStore) || !has(self.resources) || !has(self.resources.limits)"
                    " || !('memory' in self.resources.limits) || !isQuantity(string(self.resources.limits['memory']))"
                    f" || !isQuantity({_STORE_BYTES})"
                    " || quantity(string(self.resources.limits['memory'])).compareTo("
                    f"{_STORE}.add({_STORE}).add({_STORE}).add({_STORE})) >= 0",
                    _STORE_TOO_LARGE,
                    path=".responseStore.maxBytes",
                ),
            ]
        }
    )

    resources: Resources = Field(default_factory=Resources)
    """Requests and limits of the gateway's container. Where nothing is said: a tenth of a core and 256Mi requested, and
    a limit of 1Gi of memory."""
    service: Annotated[GatewayService, Change.OPERATOR] = Field(default_factory=GatewayService)
    """How clients reach the gateways."""
    http_route: Annotated[HTTPRoute | None, Change.OPERATOR] = None
    """Route of the Gateway API to the Service, where its CRDs are installed."""
    replicas: Annotated[int, Field(ge=0, le=100), Change.OPERATOR] = 1
    """Pods that take requests; any of them serves any client. With `scaling.mode: External` a Deployment that is new,
    or was suspended, begins with so many."""
    scaling: Annotated[GatewayScaling, Change.OPERATOR] = Field(default_factory=GatewayScaling)
    """Who decides how many there are."""
    image: Image | None = None
    """Gateway image. Defaults to the one of the operator's release."""
    timeouts: Annotated[Timeouts, Change.FOLLOWED] = Field(default_factory=Timeouts)
    """When the gateway gives up on a request."""
    cors: Annotated[CORS | None, Change.FOLLOWED] = None
    """Let web pages of other origins use the model from a browser. Off where nothing is said. Changing it restarts
    nothing."""
    queue: Annotated[Queue, Change.FOLLOWED] = Field(default_factory=Queue)
    """Requests that wait while no worker serves."""
    tls: GatewayTLS | None = None
    """Serve clients over TLS. Where nothing is said they are served without, at port 80."""
    response_store: Annotated[ResponseStore | None, Change.FOLLOWED] = None
    """Keep what the Responses API answers (`store`), so that clients continue it by `previous_response_id`. Off where
    nothing is said. It is gone when the gateway restarts, and needs `replicas` of 1. Changing it restarts nothing."""
    min_priority: Annotated[int, Field(ge=-1000, le=0), Change.FOLLOWED] = 0
    """The lowest `priority` that clients may ask for. Lower ones run first, so by default a client can only stand back.
    Changing it restarts nothing."""
    explain_routes: Annotated[bool, Change.FOLLOWED] = False
    """Answer `x-tandem-route: explain` with the workers chosen and the prompt tokens that were believed to be cached,
    which tells who asks what others have asked. Changing it restarts nothing."""
    convert_decode_workers: Annotated[bool, Change.FOLLOWED] = True
    """Let a decode worker compute a prompt itself while prefill workers are behind, in steps that take at most
    `slo.tpot.seconds` with a part of it. It needs prefill and decode workers that are apart, and `slo`. Changing it
    restarts nothing."""
