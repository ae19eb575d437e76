"""Which workers serve a request: pure functions and plain state, no sockets and no clock of their own.

endpoint (what is known of a worker) → pool (those of a role and revision) → picker (who serves) → reconsider (whether
the decode worker computes the prompt, by conversion). ledger has what they owe, own_prompts what decode workers do of
such prompts, health who is left out, ring where sessions are at home, prefix who has cached what, storing what they
share, pulling what bringing it costs, canary who tries a build, decision what is told of it all. The same code runs in
simulations (`bench/routing`), so nothing in here imports asyncio or reads the time.
"""

from tandem_gateway.scheduling.conversion import Terms, Verdict
from tandem_gateway.scheduling.decision import KEPT, Decision, describe_choice, describe_decision, predict
from tandem_gateway.scheduling.demand import Demand, Estimator
from tandem_gateway.scheduling.endpoint import Endpoint, Worker
from tandem_gateway.scheduling.health import Outcome, classify_status
from tandem_gateway.scheduling.ledger import Reservation
from tandem_gateway.scheduling.picker import Choice, missing_role
from tandem_gateway.scheduling.scheduler import SHORT_CHUNKS, Scheduler
from tandem_gateway.scheduling.storing import Share

__all__ = [
    "KEPT", "SHORT_CHUNKS", "Choice", "Decision", "Demand", "Endpoint", "Estimator", "Outcome",
    "Reservation", "Scheduler", "Share", "Terms", "Verdict", "Worker", "classify_status", "describe_choice",
    "describe_decision", "missing_role", "predict",
]  # fmt: skip
