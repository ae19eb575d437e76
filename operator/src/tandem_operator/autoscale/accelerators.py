"""The GPUs that a pod asks for, by the names of their resources. Pure.

Device plugins give them many names: whole GPUs of three makers, and parts of one (MIG, time slices). A quota counts
each name for itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import floor

from tandem_api.quantities import parse_quantity

from tandem_operator.objects.manifests import Manifest, dig, dig_dict, dig_list

_NAMES = re.compile(r"nvidia\.com/(gpu|gpu\.shared|mig-.+)|amd\.com/gpu|gpu\.intel\.com/(i915|xe)")
"""Names of GPUs as extended resources. Some of Intel's other names are memory or thousandths of the same GPUs, and some
do no more than look at them."""
_REQUESTS = "requests."


def is_gpu(resource: str) -> bool:
    """Whether an extended resource is GPUs, or parts of them."""
    return _NAMES.fullmatch(resource) is not None


def quota_resource(name: str) -> str | None:
    """The GPU resource that a name in a ResourceQuota bounds; None where it bounds something else."""
    resource = name.removeprefix(_REQUESTS)
    return resource if resource != name and is_gpu(resource) else None


def count_gpus(template: Manifest) -> Mapping[str, int]:
    """What a pod of this template takes of each GPU resource, as the scheduler counts it: containers and sidecars
    together, or an init container beside the sidecars before it, where that is more.

    Raises:
        ValueError: a figure is none.
    """
    together, most = Counter[str](), Counter[str]()
    for container in dig_list(template, "spec", "initContainers"):
        if dig(container, "restartPolicy") == "Always":
            together += _asked(container)
        else:
            most |= together + _asked(container)
    for container in dig_list(template, "spec", "containers"):
        together += _asked(container)
    return together | most


def _asked(container: Manifest) -> Counter[str]:
    """GPUs of one container. Limits of extended resources are requests too."""
    limits = dig_dict(container, "resources", "limits")
    return Counter({name: floor(parse_quantity(str(amount))) for name, amount in limits.items() if is_gpu(name)})
