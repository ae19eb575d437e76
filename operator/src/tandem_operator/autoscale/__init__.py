"""How many replicas roles have: what was decided, by whom, and when it is in force."""
