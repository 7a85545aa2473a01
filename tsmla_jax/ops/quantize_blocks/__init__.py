"""The operation quantize_blocks: api, reference and xla."""
