"""Repeatable measurements: baseline and Tandem interleaved in one run, medians and spread."""
