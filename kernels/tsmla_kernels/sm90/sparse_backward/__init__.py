"""The gradient of sparse_mla on Hopper, over plain caches of 16 bits. See DESIGN.md."""
