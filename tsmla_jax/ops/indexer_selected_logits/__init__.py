"""The operation indexer_selected_logits: api, reference and xla."""
