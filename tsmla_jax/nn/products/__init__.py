"""Products with weights that may be narrow: the weights' types, and kernels in Pallas."""
