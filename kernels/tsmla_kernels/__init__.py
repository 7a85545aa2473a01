"""The CuTe DSL kernels of tsmla_jax and the contract both front ends share. Imports neither jax nor torch."""

__version__ = "0.3.0"
