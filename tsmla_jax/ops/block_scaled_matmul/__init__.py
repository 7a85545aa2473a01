"""The operation block_scaled_matmul: api, reference, xla and cute."""
