"""mla_prefill on Blackwell: the operands of TokenSpeed's kernel for a call on one device, made safe for any input.

tsmla_kernels.sm100.dense_arrays says what this kernel needs.
"""

from __future__ import annotations

import jax

from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.library import LIBRARY
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_PREFILL_SM100
from tsmla_kernels.contract import PrefillSpec
from tsmla_kernels.sm100 import config as sm100
from tsmla_kernels.sm100 import dense_arrays


def on_one_device(
    given: dense_arrays.PrefillArrays,
    scales: jax.Array,
    *,
    spec: PrefillSpec,
    static_scales: tuple[float, float] | None,
    arch: str,
) -> tuple[jax.Array, jax.Array]:
    """out and lse of a call whose arrays lie on one device; spec describes those.

    Args:
      scales: [2] float32, the factors of the logits and of the outputs. static_scales: the two factors as numbers, if
        they are known, so that the launch can pass them by value.

    Raises a NotImplementedError if vmap made the call larger than the kernel can index.
    """
    if reasons := MLA_PREFILL_SM100.reasons(spec):
        raise contract.not_runnable("mla_prefill", "cute", reasons)
    config = sm100.prefill_config(spec, traced_scales=static_scales is None)
    made = dense_arrays.prefill_operands(LIBRARY, spec, config, given)
    outputs = ((*given.q.shape[:2], sm100.V_HEAD_DIM), given.q.shape[:2], (spec.max_q_len,))
    out, lse, *_ = kernel_call(
        MLA_PREFILL_SM100,
        config,
        made.operands if static_scales else (*made.operands, scales),
        outputs if static_scales is None else (*outputs, *((size,) for size in sm100.scale_sizes(*static_scales))),
        arch=arch,
    )
    found = dense_arrays.prefill_results(LIBRARY, spec, dense_arrays.Attended(out, lse), made)
    return found.out, found.lse
