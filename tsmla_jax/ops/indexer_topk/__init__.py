"""The operation indexer_topk: api, cute, reference and xla."""
