"""The operation sparse_mla: api, reference and xla."""
