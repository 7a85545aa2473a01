"""`python -m tsmla_jax.cli` is the `tsmla` command."""

from tsmla_jax.cli import main

main()
