"""What every part of the process shares: metrics, the work queue, turns of the event loop."""
