"""The PyTorch front end of the MLA kernels. Imports no jax."""
