"""The operation grouped_block_scaled_matmul: api, reference, xla and cute."""
