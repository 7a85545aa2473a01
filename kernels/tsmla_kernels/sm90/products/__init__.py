"""Products of activations with block-scaled weights, or of groups with weights of 16 bits, for Hopper."""
