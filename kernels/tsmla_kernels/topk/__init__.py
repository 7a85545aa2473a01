"""select_topk for Hopper and newer architectures, and indexer_topk, which launches it on Hopper behind the indexer's
logits."""
