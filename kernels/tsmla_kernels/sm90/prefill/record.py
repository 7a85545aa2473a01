"""mla_prefill and mla_prefill_kv on Hopper and their gradient: operands and records."""

from __future__ import annotations

from tsmla_kernels.contract import PrefillSpec, attention_out_dtype
from tsmla_kernels.kernel import MODELS, Kernel, Operand
from tsmla_kernels.option_values import unserved
from tsmla_kernels.options import prefill_spec
from tsmla_kernels.sm90.prefill import config as sm90_prefill
from tsmla_kernels.sm90.prefill.backward import config as sm90_backward

SHARED_ROPE_DIM = 64
"""The width R of k_rope in the objects for mla_prefill_kv that `tsmla compile` makes."""


SELECTION = (Operand("selection", "int32", (None, None)), Operand("selection_rows", "int32", (None,), align=4))
"""The operands of a call with a selection, after its offsets."""


def mla_prefill_operands(config: sm90_prefill.PrefillConfig) -> tuple[Operand, ...]:
    """The operands q, k and v as mla_prefill takes them, or kv and k_rope as mla_prefill_kv takes them. The number of
    heads is read at the launch. If config.wide_v, v is [Tk, H, W]. W is only the distance between rows: the memory may
    end after the first V columns of the last row."""
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
        *(SELECTION if config.selection else ()),
        *((Operand("sinks", "float32", (None,), align=4),) if config.sinks else ()),
        Operand("scales", "float32", (2,), align=4),
        Operand("out", attention_out_dtype(config.dtype), (None, None, v_dim), output=True),
        Operand("lse", "float32", (None, None), output=True, align=4),
        *((Operand("max_logits", "float32", (None, None), output=True, align=4),) if config.max_logits else ()),
        *(
            Operand(name, dtype, (None, *shape[1:]), output=True, wide=True)
            for name, (shape, dtype) in workspaces.items()
        ),
    )


def _forward_config(spec: PrefillSpec, *, shared_rope: bool) -> sm90_prefill.PrefillConfig:
    """The config of mla_prefill or, if shared_rope, of mla_prefill_kv. Raises ValueError if the kernel does not serve
    the call."""
    if not shared_rope:
        return sm90_prefill.prefill_config(spec)
    if found := sm90_prefill.shared_rope_reasons(spec, SHARED_ROPE_DIM):
        raise unserved(found)
    return sm90_prefill.prefill_config(spec, SHARED_ROPE_DIM)


# Each model has an object for mla_prefill and one for mla_prefill_kv; the layers call mla_prefill_kv.
_PRESETS = (*MODELS, *((name, (*options, ("shared_rope", "true"))) for name, options in MODELS))

MLA_PREFILL = Kernel(
    name="mla_prefill",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.prefill.kernel:MlaPrefill",
    config=sm90_prefill.PrefillConfig,
    operands=mla_prefill_operands,
    spec_from_options=prefill_spec,
    reasons=sm90_prefill.prefill_reasons,
    config_for=_forward_config,
    flags=("shared_rope",),
    presets=_PRESETS,
)


def mla_prefill_backward_operands(config: sm90_backward.BackwardConfig) -> tuple[Operand, ...]:
    """The operands of mla_prefill or, if config.rope_dim > 0, of mla_prefill_kv; then its results, their cotangents,
    the gradients, and the workspaces. lse is without the sinks, as the forward pass returns it."""
    # The leading sizes of workspaces; a size of None is read at the launch. The workspaces that are not named here have
    # (None, None).
    dynamic = {"dq_sum": (None, 2, None), "plan": (None,), "progress": (None,)}
    sinks, sink_gradient = (
        (Operand(name, "float32", (None,), output=output, align=4),) if config.sinks else ()
        for name, output in (("sinks", False), ("dsinks", True))
    )
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
        *(SELECTION if config.selection else ()),
        *sinks,
        Operand("scales", "float32", (2,), align=4),
        Operand("out", config.dtype, (None, None, v_dim)),
        Operand("lse", "float32", (None, None), align=4),
        Operand("dout", config.dtype, (None, None, v_dim)),
        Operand("dlse", "float32", (None, None), align=4),
        Operand("dq", config.dtype, (None, None, k_dim), output=True),
        *(Operand(f"d{name}", config.dtype, shape, output=True) for name, shape in keys),
        *sink_gradient,
        *(Operand(name, dtype, (*first, *size[len(first) :]), True) for name, (first, size, dtype) in leading.items()),
    )


def _backward_config(spec: PrefillSpec, *, shared_rope: bool) -> sm90_backward.BackwardConfig:
    """The config of the gradient of mla_prefill or, if shared_rope, of mla_prefill_kv."""
    return sm90_backward.backward_config(spec, SHARED_ROPE_DIM if shared_rope else 0)


MLA_PREFILL_BACKWARD = Kernel(
    name="mla_prefill_backward",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.prefill.backward.kernel:MlaPrefillBackward",
    config=sm90_backward.BackwardConfig,
    operands=mla_prefill_backward_operands,
    spec_from_options=prefill_spec,
    reasons=sm90_backward.backward_reasons,
    config_for=_backward_config,
    flags=("shared_rope",),
    presets=_PRESETS,
)
