"""The process: settings, the event loop and what runs in it, probes, logs."""
