"""DeepSeek's multi-head latent attention (MLA) for JAX."""
