"""rope_write_kv_cache in portable XLA: the separate steps, which XLA may fuse, in place when the cache is donated."""

from __future__ import annotations

import functools

from tsmla_jax.ops.rope_write_kv_cache import reference
from tsmla_jax.ops.write_kv_cache import xla as write

rope_write_kv_cache = functools.partial(reference.rope_write_kv_cache, write=write.write_kv_cache)

by_scatter = functools.partial(reference.rope_write_kv_cache, write=write.by_scatter)
"""rope_write_kv_cache by a scatter on every platform, which can be differentiated in reverse mode."""
