"""The operation mla_decode: api, reference, xla and, where there is a kernel, cute."""
