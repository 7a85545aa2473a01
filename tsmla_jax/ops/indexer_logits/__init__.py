"""The operation indexer_logits: api, reference, xla and cute, with its Blackwell part."""
