"""Discrete-event simulator of a fleet: the gateway's scheduler and the operator's planner over models of workers."""
