"""The operation mla_prefill: api, cute, reference and xla."""
