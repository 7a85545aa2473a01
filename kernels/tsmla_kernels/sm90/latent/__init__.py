"""What the Hopper kernels of latent attention have in common: schedule, ring, softmax, wide values, merging."""
