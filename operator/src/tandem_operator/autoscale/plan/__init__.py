"""How many replicas each role should have: pure functions of spec, fleet, history and the time.

contract (what goes in and out) → rates (demand, from counters) → queueing and velocity (what a replica can do) →
sizing (replicas of a role), shared (replicas that do both) → joint (budget, ratio, transfer, over both roles) → planner
(one decision) → adapter (a class with `period` and `decide`, for simulators). Around one decision in the operator:
snapshots (from reports), allotment (what a namespace has for each model), temper (what may be followed now), sleep
(whether it has any replica at all), slo (whether targets are met), words (what is told). Nothing in here imports a
client or a clock: the simulator runs the same code.
"""
