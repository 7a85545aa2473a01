"""The operation write_packed_kv_cache: api, reference, xla and cute."""
