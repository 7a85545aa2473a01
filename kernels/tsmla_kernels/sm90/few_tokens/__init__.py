"""The kernels of a decoder layer's step of up to 16 tokens, for Hopper."""
