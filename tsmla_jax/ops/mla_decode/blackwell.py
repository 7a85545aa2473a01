"""mla_decode on Blackwell: the operands of TokenSpeed's kernels for a call on one device, made safe for any input.

tsmla_kernels.sm100.dense_arrays says what these kernels need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tsmla_jax.ops import checks
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.library import LIBRARY
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_DECODE_SM100
from tsmla_kernels.contract import DecodeSpec
from tsmla_kernels.sm100 import config as sm100
from tsmla_kernels.sm100 import dense_arrays


def behind_check(spec: DecodeSpec, kv_cache: jax.Array, block_tables: jax.Array, seq_lens: jax.Array) -> jax.Array:
    """seq_lens, which under TSMLA_CHECK=1 waits for the check that unused slots of last pages are finite."""
    if not checks.enabled():
        return seq_lens
    bad = dense_arrays.not_finite(LIBRARY, spec, kv_cache, block_tables, seq_lens)
    return checks.behind(_check_finite, seq_lens, bad)


def _check_finite(seq_lens: np.ndarray, bad: np.ndarray) -> None:
    sm100.check_finite(bad.tolist())


def on_one_device(
    given: dense_arrays.DecodeArrays,
    scales: jax.Array,
    *,
    spec: DecodeSpec,
    static_scales: tuple[float, float] | None,
    arch: str,
    num_sms: int,
) -> tuple[jax.Array, jax.Array]:
    """out and lse of a call whose arrays lie on one device; spec describes those.

    Args:
      scales: [2] float32, the factors of the logits and of the outputs. static_scales: the two factors as numbers, if
        they are known, so that the launch can pass them by value.

    Raises a NotImplementedError if vmap made the call larger than the kernels can index.
    """
    if reasons := MLA_DECODE_SM100.reasons(spec):
        raise contract.not_runnable("mla_decode", "cute", reasons)
    config = sm100.decode_config(spec, traced_scales=static_scales is None)
    outputs = sm100.decode_outputs(spec, config, arch, num_sms, **_bounds(spec.batch, spec.max_pages))
    inputs = dense_arrays.decode_operands(LIBRARY, spec, config, given)
    out, lse, *_ = kernel_call(
        MLA_DECODE_SM100,
        config,
        inputs if static_scales else (*inputs, scales),
        outputs if static_scales is None else (*outputs, *((size,) for size in sm100.scale_sizes(*static_scales))),
        arch=arch,
    )
    attended = dense_arrays.Attended(out, lse)
    found = dense_arrays.decode_results(LIBRARY, spec, attended, inputs.visible_lens, given.cu_seqlens_q)
    return found.out, found.lse


def _bounds(*sizes: Any) -> dict[str, Callable[[Any, Any], Any]]:
    """min and max for plain ints; jax's own for symbolic sizes, which can't be compared."""
    if all(isinstance(size, int) for size in sizes):
        return {}
    return {"minimum": jax.core.min_dim, "maximum": jax.core.max_dim}
