"""Products of activations with block-scaled weights, for Hopper."""
