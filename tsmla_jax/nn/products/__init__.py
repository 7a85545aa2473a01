"""Products with weights that may be narrow, and kernels in Pallas, of these products and of other operations."""
