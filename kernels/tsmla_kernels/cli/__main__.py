"""`python -m tsmla_kernels.cli` is the `tsmla` command."""

from tsmla_kernels.cli import main

main()
