"""What the `tsmla` command says of jax: its devices, the usual calls, and `tsmla explain`."""
