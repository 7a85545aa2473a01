"""Parts of the `tsmla` command that need jax: jax's devices, the usual calls, and `tsmla explain`."""
