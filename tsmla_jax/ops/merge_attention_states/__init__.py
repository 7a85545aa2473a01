"""The operation merge_attention_states: api, cute, reference and xla."""
