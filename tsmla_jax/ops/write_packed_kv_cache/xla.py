"""write_packed_kv_cache in portable XLA, which runs the definition as it is."""

from __future__ import annotations

from tsmla_jax.ops.write_packed_kv_cache import reference

write_packed_kv_cache = reference.write_packed_kv_cache
