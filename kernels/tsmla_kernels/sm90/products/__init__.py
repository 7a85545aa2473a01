"""Products of e4m3 activations and weights with scales for blocks, for Hopper."""
