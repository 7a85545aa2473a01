"""The operation select_topk: api, cute, reference and xla."""
