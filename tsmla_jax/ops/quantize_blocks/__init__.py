"""The operation quantize_blocks: api, reference, xla and cute."""
