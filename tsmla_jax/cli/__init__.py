"""Parts of the `tsmla` command that need jax: its devices, the usual calls, and `tsmla explain`."""
