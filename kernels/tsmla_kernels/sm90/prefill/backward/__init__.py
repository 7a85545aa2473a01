"""The gradient of prefill, for Hopper."""
