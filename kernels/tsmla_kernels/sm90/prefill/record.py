"""mla_prefill and mla_prefill_kv on Hopper and their gradient: operands and records."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tsmla_kernels.contract import PrefillSpec, attention_out_dtype
from tsmla_kernels.kernel import MODELS, Kernel, Operand
from tsmla_kernels.options import config_of, flag, prefill_spec
from tsmla_kernels.sm90.prefill import backward_config as sm90_backward
from tsmla_kernels.sm90.prefill import config as sm90_prefill

SHARED_ROPE_DIM = 64
"""R of the objects for mla_prefill_kv that `tsmla compile` makes."""


def mla_prefill_operands(config: sm90_prefill.PrefillConfig) -> tuple[Operand, ...]:
    """q, k and v as mla_prefill takes them, or kv and k_rope as mla_prefill_kv does; the number of heads is read at the
    launch. With wide_v, v [Tk, H, W] has a stride of W for a shape, and the last row need not be whole."""
    workspaces = sm90_prefill.prefill_workspaces(1, 1)
    k_dim, v_dim, rope_dim = config.qk_head_dim, config.v_head_dim, config.rope_dim
    v_width = None if config.wide_v else v_dim
    keys = (Operand("k", config.dtype, (None, None, k_dim)), Operand("v", config.dtype, (None, None, v_width)))
    if rope_dim:
        kv = Operand("kv", config.dtype, (None, None, k_dim - rope_dim + v_dim))
        keys = (kv, Operand("k_rope", config.dtype, (None, rope_dim)))
    return (
        Operand("q", config.dtype, (None, None, k_dim)),
        *keys,
        Operand("cu_seqlens_q", "int32", (None,), align=4),
        Operand("cu_seqlens_kv", "int32", (None,), align=4),
        Operand("scales", "float32", (2,), align=4),
        Operand("out", attention_out_dtype(config.dtype), (None, None, v_dim), output=True),
        Operand("lse", "float32", (None, None), output=True, align=4),
        *(Operand(name, dtype, (None, *shape[1:]), output=True) for name, (shape, dtype) in workspaces.items()),
    )


def _forward_from_options(options: Mapping[str, str]) -> sm90_prefill.PrefillConfig:
    """The config of options on the command line; shared_rope=true is for mla_prefill_kv."""
    if not flag(options, "shared_rope"):
        return config_of(prefill_spec, sm90_prefill.prefill_reasons, sm90_prefill.prefill_config, options)

    def reasons(spec: PrefillSpec) -> list[str]:
        return sm90_prefill.prefill_reasons(spec) + sm90_prefill.shared_rope_reasons(spec, SHARED_ROPE_DIM)

    return config_of(prefill_spec, reasons, partial(sm90_prefill.prefill_config, rope_dim=SHARED_ROPE_DIM), options)


# mla_prefill and mla_prefill_kv, which the layers call.
_PRESETS = (*MODELS, *((name, (*options, ("shared_rope", "true"))) for name, options in MODELS))

MLA_PREFILL = Kernel(
    name="mla_prefill",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.prefill.kernel:MlaPrefill",
    config=sm90_prefill.PrefillConfig,
    operands=mla_prefill_operands,
    from_options=_forward_from_options,
    presets=_PRESETS,
)


def mla_prefill_backward_operands(config: sm90_backward.BackwardConfig) -> tuple[Operand, ...]:
    """The operands of mla_prefill or mla_prefill_kv, its results and their cotangents; the gradients, and the
    workspaces."""
    # Leading sizes of the workspaces: two are read at the launch, but for these.
    dynamic = {"dq_sum": (None, 2, None), "plan": (None,), "progress": (None,)}
    leading = {
        name: (dynamic.get(name, (None, None)), shape, dtype)
        for name, (shape, dtype) in sm90_backward.backward_workspaces(config, 1, 1, 1, 1, 1).items()
    }
    k_dim, v_dim, rope_dim = config.qk_head_dim, config.v_head_dim, config.rope_dim
    keys: tuple[tuple[str, tuple[int | None, ...]], ...] = (("k", (None, None, k_dim)), ("v", (None, None, v_dim)))
    if rope_dim:
        keys = (("kv", (None, None, k_dim - rope_dim + v_dim)), ("k_rope", (None, rope_dim)))
    return (
        Operand("q", config.dtype, (None, None, k_dim)),
        *(Operand(name, config.dtype, shape) for name, shape in keys),
        Operand("cu_seqlens_q", "int32", (None,), align=4),
        Operand("cu_seqlens_kv", "int32", (None,), align=4),
        Operand("scales", "float32", (2,), align=4),
        Operand("out", config.dtype, (None, None, v_dim)),
        Operand("lse", "float32", (None, None), align=4),
        Operand("dout", config.dtype, (None, None, v_dim)),
        Operand("dlse", "float32", (None, None), align=4),
        Operand("dq", config.dtype, (None, None, k_dim), output=True),
        *(Operand(f"d{name}", config.dtype, shape, output=True) for name, shape in keys),
        *(Operand(name, dtype, (*first, *size[len(first) :]), True) for name, (first, size, dtype) in leading.items()),
    )


def _backward_from_options(options: Mapping[str, str]) -> sm90_backward.BackwardConfig:
    """The config of options on the command line; as mla_prefill's, and deterministic=true for gradients that repeat
    bit by bit."""
    rope_dim = SHARED_ROPE_DIM if flag(options, "shared_rope") else 0
    config = partial(sm90_backward.backward_config, rope_dim=rope_dim)
    return config_of(prefill_spec, sm90_backward.backward_reasons, config, options)


MLA_PREFILL_BACKWARD = Kernel(
    name="mla_prefill_backward",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.prefill.backward:MlaPrefillBackward",
    config=sm90_backward.BackwardConfig,
    operands=mla_prefill_backward_operands,
    from_options=_backward_from_options,
    presets=_PRESETS,
)
