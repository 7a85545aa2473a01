"""Expanded MLA prefill, for Hopper."""
