"""mla_prefill_kv in portable XLA: make k and v, then mla_prefill in XLA."""

from __future__ import annotations

import functools

from tsmla_jax.ops.mla_prefill import xla
from tsmla_jax.ops.mla_prefill_kv import reference

mla_prefill_kv = functools.partial(reference.mla_prefill_kv, attend=xla.mla_prefill)
