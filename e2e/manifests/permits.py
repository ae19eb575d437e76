"""The rules that are switched off, each with its reason. A reason that applies to nothing any more fails the check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a linter says about an object."""

    rule: str
    file: str
    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.kind} {self.name}: {self.rule}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Findings that are let be: of these rules, on objects of this kind, with this in their text."""

    rules: tuple[str, ...]
    reason: str
    kind: str = ""
    """Empty: every kind."""
    text: str = ""

    def covers(self, finding: Finding) -> bool:
        return finding.rule in self.rules and self.kind in ("", finding.kind) and self.text in finding.text


PERMITS: Sequence[Permit] = (
    Permit(
        rules=("container-resources", "CKV_K8S_11"), text="CPU limit",
        reason="A CPU limit stops a process in the middle of a stream although the node has time to spare. Requests "
        "share the node; `resources` takes limits.",
    ),
    Permit(
        rules=("container-resources", "CKV_K8S_12"), kind="StatefulSet", text="request",
        reason="Requests of workers follow from the size of the weights. The operator has not been told the size of "
        "these models, and a guess would keep pods from nodes that they fit on.",
    ),
    Permit(
        rules=("container-resources", "CKV_K8S_13"), kind="StatefulSet", text="emory limit",
        reason="Pages of the checkpoint's files count against a limit too, and would end a worker while it loads.",
    ),
    Permit(
        rules=("container-ephemeral-storage-request-and-limit",),
        reason="Nothing is written outside of volumes: root file systems are read-only, and the kubelet rotates logs.",
    ),
    Permit(
        rules=("container-image-pull-policy", "CKV_K8S_15"),
        reason="Tags are versions, which do not change, and a pod should start again without its registry. "
        "`imagePullPolicy` is a field of each role and a value of the chart.",
    ),
    Permit(
        rules=("CKV_K8S_43",),
        reason="The digests of a release are not known when its chart is written. `images` and `image` take digests.",
    ),
    Permit(
        rules=("CKV_K8S_38",), kind="Deployment",
        reason="The operator and the gateways ask the API server. Workers do not, and have no token.",
    ),
    Permit(
        rules=("deployment-replicas",), kind="Deployment",
        reason="One operator and one gateway fit a small cluster. More of both is a value and a field.",
    ),
    Permit(
        rules=("deployment-has-host-podantiaffinity", "statefulset-has-host-podantiaffinity"),
        reason="Replicas spread over nodes by topologySpreadConstraints, which these rules do not read.",
    ),
    Permit(
        rules=("pod-probes-identical",), kind="StatefulSet",
        reason="vLLM and SGLang have one path that tells of their health. A worker that fails it twice gets no "
        "requests, one that fails it six times is restarted.",
    ),
    Permit(
        rules=("CKV_K8S_35",), kind="StatefulSet",
        reason="A token for the model hub is the environment variable that the hub's clients read.",
    ),
)  # fmt: skip


def judge(findings: Sequence[Finding], permits: Sequence[Permit]) -> list[str]:
    """What is wrong, a sentence each: findings without a permit, and permits without a finding."""
    wrong = [str(finding) for finding in findings if not any(permit.covers(finding) for permit in permits)]
    idle = [permit for permit in permits if not any(map(permit.covers, findings))]
    return wrong + [f"the permit for {', '.join(permit.rules)} applies to nothing: remove it" for permit in idle]
