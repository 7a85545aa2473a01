"""jax as the library for the rules on arrays that both front ends share (tsmla_kernels.arrays)."""

from __future__ import annotations

import functools
import operator

import jax.numpy as jnp

from tsmla_kernels.arrays import Library

LIBRARY = Library(jnp, functools.partial(jnp.arange, dtype=jnp.int32), operator.getitem)
