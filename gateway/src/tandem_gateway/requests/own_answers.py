"""Questions that the gateway answers by itself, as other servers do on their API's port: is it there, and how busy."""

from __future__ import annotations

from tandem_api.names import Role
from tandem_api.version import VERSION

from tandem_gateway.errors import NoEndpoint, ShuttingDown
from tandem_gateway.scheduling import Scheduler, missing_role

HEALTH = frozenset(("/health", "/ping"))
OWN_PATHS = HEALTH | {"/version", "/load"}


def answer_own(path: str, scheduler: Scheduler, *, in_flight: int, draining: bool, wakes: bool = False) -> object:
    """One of OWN_PATHS. `wakes`: the model sleeps while nobody asks anything, and then no worker is there.

    Raises:
        ShuttingDown: it is asked whether it is well, and takes no more requests.
        NoEndpoint: it is, but there is nobody to answer them.
    """
    if path == "/version":
        return {"version": VERSION}
    if path == "/load":
        return {"server_load": in_flight}
    if draining:
        raise ShuttingDown("this gateway is shutting down")
    endpoints = list(scheduler.endpoints.values())
    if wakes and not endpoints:
        return {}  # whoever goes by this answer must send the request that wakes the model
    decoding = [endpoint for endpoint in endpoints if endpoint.worker.role is not Role.PREFILL]
    if all(endpoint.state == "ejected" for endpoint in decoding):
        raise NoEndpoint(missing_role(endpoints))
    return {}
