"""The operation mla_prefill_kv: api, reference, xla and cute."""
