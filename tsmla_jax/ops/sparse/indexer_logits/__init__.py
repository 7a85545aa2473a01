"""The operation indexer_logits (its public function is in tsmla_jax.ops.sparse.indexer): reference and xla."""
