"""The operation indexer_quantize: api, reference, xla and cute."""
