"""The operation compress_kv: api, reference and xla."""
