"""Which workers serve a request: pure functions and plain state, no sockets and no clock of their own.

endpoint (what is known of a worker) → filter (who may) → scorer (how soon) → picker (who does). The same code runs
in simulations, so nothing in here imports asyncio or reads the time.
"""

from tandem_gateway.scheduling.demand import Demand, Estimator
from tandem_gateway.scheduling.endpoint import Endpoint, Reservation, Worker
from tandem_gateway.scheduling.picker import Choice, missing_role
from tandem_gateway.scheduling.scheduler import Scheduler

__all__ = ["Choice", "Demand", "Endpoint", "Estimator", "Reservation", "Scheduler", "Worker", "missing_role"]
