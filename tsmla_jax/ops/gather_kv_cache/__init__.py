"""The operation gather_kv_cache: api, cute, reference and xla."""
