"""The operation indexer_logits: api, reference and xla."""
