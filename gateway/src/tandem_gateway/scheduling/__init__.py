"""Which workers serve a request: pure functions and plain state, no sockets and no clock of their own.

endpoint (what is known of a worker) → pool (those of a role and revision) → picker (who serves). ledger has what they
owe, health who is left out, ring where sessions are at home, prefix who has cached what, canary who tries a build. The
same code runs in simulations (`bench/routing`), so nothing in here imports asyncio or reads the time.
"""

from tandem_gateway.scheduling.demand import Demand, Estimator
from tandem_gateway.scheduling.endpoint import Endpoint, Worker
from tandem_gateway.scheduling.health import REQUESTS_FAULT, Outcome, classify_status
from tandem_gateway.scheduling.ledger import Reservation
from tandem_gateway.scheduling.picker import Choice, missing_role
from tandem_gateway.scheduling.scheduler import Scheduler

__all__ = [
    "REQUESTS_FAULT", "Choice", "Demand", "Endpoint", "Estimator", "Outcome", "Reservation", "Scheduler", "Worker",
    "classify_status", "missing_role",
]  # fmt: skip
