"""Products with weights that may be narrow, and all kernels in Pallas, of these products and others."""
