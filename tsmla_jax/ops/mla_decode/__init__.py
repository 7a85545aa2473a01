"""The operation mla_decode: api, cute, reference and xla."""
