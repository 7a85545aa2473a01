"""Writing and reading the paged latent cache: the kernels and their configurations, of any architecture."""
