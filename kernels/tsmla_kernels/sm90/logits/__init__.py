"""indexer_logits for Hopper."""
