"""The operation mla_prefill: api, reference, xla and, where there is a kernel, cute."""
