"""The kernel that makes the bits of a selection from positions, for Hopper and newer architectures."""
