"""Multi-head latent attention as DeepSeek-V2, V2-Lite, V3, R1 and Kimi-K2 have it."""
