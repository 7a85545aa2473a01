"""The operation write_indexer_cache: api, reference, xla and cute."""
