"""Device helpers that more than one kernel uses."""
