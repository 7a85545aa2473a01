"""The operations, one folder each: api, reference, xla and, where there is a kernel, cute."""
