"""write_indexer_cache in portable XLA, which runs the definition as it is."""

from __future__ import annotations

from tsmla_jax.ops.write_indexer_cache import reference

write_indexer_cache = reference.write_indexer_cache
