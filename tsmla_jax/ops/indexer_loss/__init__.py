"""The operation indexer_loss: api, reference and xla."""
