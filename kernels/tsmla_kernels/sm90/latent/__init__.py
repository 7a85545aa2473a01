"""The common parts of the Hopper kernels of latent attention: schedule, ring, softmax, wide values, merging."""
