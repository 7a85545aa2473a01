"""The kernels that write and read the paged latent cache, and their configurations, for Hopper and newer
architectures."""
