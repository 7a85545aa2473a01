"""The operation merge_attention_states: api, reference, xla and, where there is a kernel, cute."""
