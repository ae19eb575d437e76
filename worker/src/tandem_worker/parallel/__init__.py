"""Ranks of one model replica: what each holds and how they talk."""
