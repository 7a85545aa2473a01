"""indexer_quantize in portable XLA, which runs the definition as it is."""

from __future__ import annotations

from tsmla_jax.ops.indexer_quantize import reference

indexer_quantize = reference.indexer_quantize
