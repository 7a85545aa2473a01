"""The operation compress_write_kv_cache: api, reference, xla and cute."""
