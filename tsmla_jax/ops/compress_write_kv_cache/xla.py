"""compress_write_kv_cache in portable XLA: the steps of the definition, pooling blocks of entries."""

from __future__ import annotations

import functools

from tsmla_jax.ops.compress_kv import xla
from tsmla_jax.ops.compress_write_kv_cache import reference

compress_write_kv_cache = functools.partial(reference.compress_write_kv_cache, compress=xla.compress_kv)
