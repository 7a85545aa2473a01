"""Checkpoints in Hugging Face's format: their configs and weights, read and written."""
