"""sparse_mla on Hopper: attention over selected slots. See DESIGN.md."""
