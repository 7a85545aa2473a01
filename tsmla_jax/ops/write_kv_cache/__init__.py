"""The operation write_kv_cache: api, cute, reference and xla."""
