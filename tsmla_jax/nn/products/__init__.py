"""Products with weights that may be narrow, and kernels in Pallas for these products and for other operations."""
