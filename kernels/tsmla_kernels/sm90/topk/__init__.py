"""select_topk for Hopper, and indexer_topk, which launches it behind the indexer's logits."""
