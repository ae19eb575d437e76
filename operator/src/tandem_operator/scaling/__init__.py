"""How many replicas each role should have: pure functions of spec, fleet, history and the time.

contract (what goes in and out) → rates (demand, from counters) → queueing and velocity (what a replica can do) →
sizing (replicas of a role) → joint (budget, ratio, transfer, over both roles) → planner (one decision) → adapter (a
class with `period` and `decide`, for simulators). Nothing in here imports a client, a clock or the rest of the
operator: the simulator runs the same code.
"""
