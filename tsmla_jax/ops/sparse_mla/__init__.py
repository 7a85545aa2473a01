"""The operation sparse_mla: api, reference, xla and cute."""
