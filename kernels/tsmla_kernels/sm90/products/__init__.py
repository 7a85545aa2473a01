"""Products of activations with e4m3 weights that have a scale for each block, for Hopper."""
