"""The cluster's network: a namespace that is connected to this machine and to nothing else.

The host end of the link and the node end share a /30. Routes on the host lead the Service and pod ranges into the
namespace, so that clients on this machine reach ClusterIPs and pods directly. Inside, every other destination is
unreachable: it fails at once instead of hanging.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from ..commands import run, succeeds
from ..errors import ClusterError

SLOTS = 64
Network = ipaddress.IPv4Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """The address ranges of one cluster. Slot `n` of 64 gets its own, so clusters of several checkouts coexist."""

    slot: int

    @property
    def link(self) -> Network:
        return Network(f"10.88.{self.slot}.0/30")

    @property
    def host(self) -> str:
        return f"10.88.{self.slot}.1"

    @property
    def node(self) -> str:
        return f"10.88.{self.slot}.2"

    @property
    def pods(self) -> Network:
        return Network(f"10.244.{self.slot}.0/24")

    @property
    def services(self) -> Network:
        return Network(f"10.96.{4 * self.slot}.0/22")

    @property
    def api_service(self) -> str:
        """The ClusterIP of `kubernetes.default`: the first address of the range, by convention."""
        return str(self.services[1])

    @property
    def ranges(self) -> tuple[Network, ...]:
        return (self.link, self.pods, self.services)


def plan_addresses(cluster_id: str, taken: list[Network]) -> Addresses:
    """The first free slot, searched from one that the id picks. Raises ClusterError when all overlap with `taken`."""
    first = int(cluster_id, 16) % SLOTS
    for step in range(SLOTS):
        addresses = Addresses(slot=(first + step) % SLOTS)
        if not any(mine.overlaps(other) for mine in addresses.ranges for other in taken):
            return addresses
    raise ClusterError(
        "every address range that a cluster could take (parts of 10.88.0.0/16, 10.96.0.0/16 and 10.244.0.0/16) is "
        "routed elsewhere on this machine; disconnect the VPN or bridge that holds them"
    )


def parse_routes(routes_json: str) -> list[Network]:
    """Destinations of `ip -json route`, without the default route."""
    destinations = (route.get("dst", "default") for route in json.loads(routes_json or "[]"))
    return [Network(dst, strict=False) for dst in destinations if dst not in {"default", "0.0.0.0/0"}]


def observe_routes() -> list[Network]:
    return parse_routes(run("ip", "-4", "-json", "route", "show", "table", "all", "type", "unicast"))


class Namespace:
    """The network namespace `tandem-<id>` and its link `tdm<id>`."""

    def __init__(self, cluster_id: str) -> None:
        self.name = f"tandem-{cluster_id}"
        self.link = f"tdm{cluster_id}"

    @property
    def path(self) -> Path:
        return Path("/run/netns") / self.name

    def enter(self, *command: str | Path) -> list[str]:
        """The command, run inside. Not `ip netns exec`: that remounts /sys, and the kubelet then finds no cgroups."""
        return ["nsenter", f"--net={self.path}", *map(str, command)]

    def exists(self) -> bool:
        return self.path.exists()

    def create(self, addresses: Addresses) -> None:
        """Raises CommandFailed where the kernel refuses, with what it said."""
        inside = ("ip", "-n", self.name)
        run("ip", "netns", "add", self.name)
        run(*inside, "link", "set", "lo", "up")
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "addr", "add", f"{addresses.host}/30", "dev", self.link)
        run("ip", "link", "set", self.link, "up")
        run(*inside, "addr", "add", f"{addresses.node}/30", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "route", "add", "unreachable", "default")
        # What runs on the node itself, the API server first, reaches Services too: kube-proxy replaces the address of a
        # packet only once a route for it was found.
        run(*inside, "route", "add", str(addresses.services), "dev", "eth0")
        for network in (addresses.pods, addresses.services):
            run("ip", "route", "add", str(network), "via", addresses.node)
        self._set_kernel_parameters()

    def _set_kernel_parameters(self) -> None:
        if not Path("/proc/sys/net/bridge").exists() and not succeeds("modprobe", "br_netfilter"):
            raise ClusterError(
                "the kernel module br_netfilter cannot be loaded; Services need it (`modprobe br_netfilter`)"
            )
        for parameter in ("net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1"):
            run(*self.enter("sysctl", "-qw", parameter))

    def remove(self) -> None:
        """Routes and both ends of the link go with it."""
        if self.exists():
            run("ip", "netns", "del", self.name)
        succeeds("ip", "link", "del", self.link)  # the kernel removes it too, in its own time
