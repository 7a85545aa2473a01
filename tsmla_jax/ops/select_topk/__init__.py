"""The operation select_topk: api, reference and xla."""
