"""Metrics, telemetry and NVML."""
