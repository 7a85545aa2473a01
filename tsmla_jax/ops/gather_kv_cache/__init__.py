"""The operation gather_kv_cache: api, reference, xla and, where there is a kernel, cute."""
