"""The operation selection_bits: api, reference, xla and cute."""
