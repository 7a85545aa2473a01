"""Kernels that use nothing of one architecture alone, and the choice of their configurations."""
