"""The operation rope_write_kv_cache: api, reference, xla and cute."""
