"""What runs in a cluster of plain binaries: command lines and configuration files, as data.

Everything here is a function of `ClusterPlan`, so that a changed plan is noticed (`up` then starts anew) and tests need
no machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .network import Addresses
from .pki import FRONT_PROXY, NODE

REGISTRY_HOST = "registry.tandem.internal:5000"
"""The registry's name in image references. containerd maps it to the node's address; nothing resolves it."""
REGISTRY_PORT = 5000
PAUSE_IMAGE = f"{REGISTRY_HOST}/pause:1"
DNS_USER = "system:coredns"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    state: Path
    addresses: Addresses
    programs: Mapping[str, Path]
    """Paths of built programs and of containerd, by name."""
    containerd_root: Path
    registry_storage: Path
    cni_plugins: Path
    snapshotter: str
    can_lower_oom_score: bool
    """Whether this process has CAP_SYS_RESOURCE; without it runc cannot lower oom_score_adj and every sandbox dies."""
    cgroup_root: str

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd" / "containerd.sock"

    @property
    def registry_address(self) -> str:
        return f"{self.addresses.node}:{REGISTRY_PORT}"


def etcd(plan: ClusterPlan) -> list[str]:
    url, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return [
        f"--data-dir={plan.state / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",  # a test cluster does not outlive the machine
        "--log-level=warn",
    ]


def apiserver(plan: ClusterPlan) -> list[str]:
    pki, node = plan.pki, plan.addresses.node
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        f"--service-cluster-ip-range={plan.addresses.services}",
        f"--bind-address={node}",
        f"--advertise-address={node}",
        "--secure-port=6443",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--service-account-key-file={pki}/sa.key",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={pki}/admin.crt",
        f"--kubelet-client-key={pki}/admin.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",  # the default looks the node's name up in DNS
        # The aggregation layer: metrics of an HPA come from API servers behind this one.
        f"--proxy-client-cert-file={pki}/{FRONT_PROXY}.crt",
        f"--proxy-client-key-file={pki}/{FRONT_PROXY}.key",
        f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
        f"--requestheader-allowed-names={FRONT_PROXY}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
    ]


def controller_manager(plan: ClusterPlan) -> list[str]:
    return [
        f"--kubeconfig={plan.pki}/controller-manager.kubeconfig",
        f"--cluster-cidr={plan.addresses.pods}",
        f"--node-cidr-mask-size={plan.addresses.pods.prefixlen}",
        "--allocate-node-cidrs=true",
        f"--cluster-signing-cert-file={plan.pki}/ca.crt",
        f"--cluster-signing-key-file={plan.pki}/ca.key",
        f"--root-ca-file={plan.pki}/ca.crt",
        f"--service-account-private-key-file={plan.pki}/sa.key",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        "--node-monitor-period=1s",  # how soon a new node's taint goes
        "--node-monitor-grace-period=25s",  # the kubelet renews its lease every 5 s
    ]


def scheduler(plan: ClusterPlan) -> list[str]:
    return [f"--kubeconfig={plan.pki}/scheduler.kubeconfig", "--leader-elect=false", "--bind-address=127.0.0.1"]


def kubelet(plan: ClusterPlan) -> list[str]:
    return [
        f"--config={plan.state}/kubelet.json",
        f"--kubeconfig={plan.pki}/kubelet.kubeconfig",
        f"--root-dir={plan.state}/kubelet",
        f"--hostname-override={NODE}",
        f"--node-ip={plan.addresses.node}",
    ]


def kubelet_config(plan: ClusterPlan) -> dict[str, Any]:
    pki = plan.pki
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": plan.cgroup_root,  # two kubelets under one root would remove each other's pods
        "containerRuntimeEndpoint": f"unix://{plan.containerd_socket}",
        "clusterDNS": [plan.addresses.node],
        "clusterDomain": "cluster.local",
        "resolvConf": str(plan.state / "resolv.conf"),
        "failSwapOn": False,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/kubelet.crt",
        "tlsPrivateKeyFile": f"{pki}/kubelet.key",
        "address": plan.addresses.node,
        "healthzBindAddress": "127.0.0.1",
        # How often a pod is looked at without cause, and so how soon a changed Secret is in it: a minute by default.
        "syncFrequency": "4s",
        # How soon a pod that writes more than its limit to a volume is evicted: after a minute by default.
        "volumeStatsAggPeriod": "10s",
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        # On a full disk the kubelet would delete images that nothing can download again.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeLeaseDurationSeconds": 20,  # a quarter of it is how often the lease is renewed
        "enforceNodeAllocatable": ["pods"],
        "volumePluginDir": str(plan.state / "kubelet-plugins"),
        "serializeImagePulls": False,
        "registryPullQPS": 0,
    }


def proxy_config(plan: ClusterPlan) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{plan.pki}/proxy.kubeconfig"},
        "mode": "iptables",
        "clusterCIDR": str(plan.addresses.pods),
        "hostnameOverride": NODE,
        "bindAddress": plan.addresses.node,
        "iptables": {"minSyncPeriod": "0s"},  # a Service answers as soon as its endpoints are known
        # Connection tracking limits belong to the host; inside a namespace they cannot be set.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def containerd_config(plan: ClusterPlan) -> str:
    """TOML, version 2: containerd 1.6 reads it, containerd 2 migrates it."""
    folder = plan.state / "containerd"
    return f"""version = 2
root = "{plan.containerd_root}"
state = "{folder}/state"
[grpc]
  address = "{plan.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = {str(not plan.can_lower_oom_score).lower()}
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plan.cni_plugins}"
    conf_dir = "{plan.state}/cni"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{folder}/certs.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{plan.snapshotter}"
    discard_unpacked_layers = true
"""


def cni_config(plan: ClusterPlan) -> dict[str, Any]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": str(plan.addresses.pods)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(plan.state / "cni-addresses"),
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "tandem", "plugins": [bridge, ports]}


def corefile(plan: ClusterPlan) -> str:
    """The cluster's names, and NXDOMAIN for all others: there is nobody to ask."""
    return f"""cluster.local:53 {{
  bind {plan.addresses.node}
  errors
  kubernetes cluster.local {{
    kubeconfig {plan.pki}/coredns.kubeconfig
    pods insecure
    ttl 1
  }}
}}
.:53 {{
  bind {plan.addresses.node}
  template ANY ANY . {{
    rcode NXDOMAIN
  }}
}}
"""


def dns_permissions() -> list[dict[str, Any]]:
    """A role of its own: the built-in `view` is empty until a controller has filled it."""
    name, group = {"name": "tandem-dns"}, "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    role = {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": name, "rules": rules}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": name,
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", **name},
        "subjects": [{"apiGroup": group, "kind": "User", "name": DNS_USER}],
    }
    return [role, binding]


def registry_config(plan: ClusterPlan) -> dict[str, Any]:
    return {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(plan.registry_storage)}, "delete": {"enabled": True}},
        "http": {"addr": plan.registry_address},
    }


def registry_hosts(address: str) -> str:
    """containerd's hosts.toml: every request for a registry goes to `address` instead."""
    return f"""server = "http://{address}"
[host."http://{address}"]
  capabilities = ["pull", "resolve"]
"""


def files(plan: ClusterPlan) -> dict[Path, str]:
    """Every configuration file, by path."""
    folder = plan.state / "containerd"
    return {
        plan.state / "kubelet.json": json.dumps(kubelet_config(plan), indent=1),
        plan.state / "proxy.json": json.dumps(proxy_config(plan), indent=1),
        plan.state / "registry.json": json.dumps(registry_config(plan), indent=1),
        plan.state / "Corefile": corefile(plan),
        plan.state / "resolv.conf": f"nameserver {plan.addresses.node}\n",
        plan.state / "cni" / "10-tandem.conflist": json.dumps(cni_config(plan), indent=1),
        folder / "config.toml": containerd_config(plan),
        folder / "certs.d" / REGISTRY_HOST / "hosts.toml": registry_hosts(plan.registry_address),
        # An image that was never loaded fails at once instead of after a time-out.
        folder / "certs.d" / "_default" / "hosts.toml": registry_hosts("127.0.0.1:1"),
    }


def commands(plan: ClusterPlan) -> dict[str, list[str]]:
    """Command lines by component, program first, in the order of start."""
    arguments = {
        "etcd": etcd(plan),
        "registry": ["serve", str(plan.state / "registry.json")],
        "containerd": ["--config", str(plan.state / "containerd" / "config.toml")],
        "kube-apiserver": apiserver(plan),
        "kube-controller-manager": controller_manager(plan),
        "kube-scheduler": scheduler(plan),
        "kubelet": kubelet(plan),
        "kube-proxy": [f"--config={plan.state}/proxy.json"],
        "coredns": ["-conf", str(plan.state / "Corefile")],
    }
    return {name: [str(plan.programs[name]), *rest] for name, rest in arguments.items()}
