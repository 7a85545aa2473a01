"""The operation select_topk (its public function is in tsmla_jax.ops.sparse.indexer): reference and xla."""
