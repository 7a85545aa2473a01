"""Sparse MLA: the V3.2 indexer and the V4 compressor, their caches, and attention over selected slots."""
