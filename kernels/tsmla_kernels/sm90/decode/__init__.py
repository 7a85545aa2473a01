"""Absorbed MLA decode over a paged latent cache, for Hopper."""
