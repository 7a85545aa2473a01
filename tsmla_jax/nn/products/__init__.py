"""Products with weights that may be narrow: the weights' types, and the kernels in Pallas that other GPUs take."""
