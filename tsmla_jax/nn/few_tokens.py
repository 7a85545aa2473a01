"""The parts of a decoder layer's step of up to 16 tokens, each as one kernel on Hopper (`attend_by_kernel` as two).

Such a step spends its time on reading weights and on starting kernels. So the product after a norm computes the norm,
the product before a residual adds it, and the kernel that writes the cache also makes the absorbed queries. A function
whose kernel can't run computes the same by other operations, unless its name ends in by_kernel.

A program with these kernels is not partitioned automatically over devices (it may run under `jax.shard_map`), has no
derivative and can't be vmapped. Axes: T tokens, K terms, N rows of a weight, E experts, P experts of a token, C hidden
columns, I columns of an expert, H heads; in attention N, L and R are nope, latent and rope columns.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tsmla_jax import sparse
from tsmla_jax.nn.norms import Norm, rms_norm
from tsmla_jax.nn.products.block_scaled import BlockScaled, widened
from tsmla_jax.nn.products.linear import linear
from tsmla_jax.ops import checks, device
from tsmla_jax.ops.inputs import Scales, scale_operand
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.mla_decode import cute
from tsmla_jax.ops.mla_decode.api import OPERATION
from tsmla_jax.ops.quantize import quantize_q
from tsmla_jax.ops.rotation import rotate
from tsmla_jax.ops.write_kv_cache.api import write_kv_cache
from tsmla_kernels.contract import DecodeSpec
from tsmla_kernels.contract.layouts import INDEXER
from tsmla_kernels.kernel import Kernel
from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.decode.config import decode_config
from tsmla_kernels.sm90.few_tokens import record
from tsmla_kernels.sm90.few_tokens.config import (
    MOST_NORMED_TERMS,
    MOST_TERMS,
    REGISTERS,
    ChoiceSpec,
    ExpertsSpec,
    MatmulSpec,
    QueriesSpec,
    RouterSpec,
)
from tsmla_kernels.sm90.few_tokens.config import MOST_TOKENS as MOST_TOKENS
from tsmla_kernels.sm90.few_tokens.index_key_config import IndexKeySpec
from tsmla_kernels.sm90.few_tokens.values_config import ValuesSpec

Weight = jax.Array | BlockScaled


class Rope(NamedTuple):
    """The rotation of rope columns: cos and sin f32 [T, R / 2], and how pairs lie before and after it (`rotate`)."""

    cos: jax.Array
    sin: jax.Array
    interleave: bool
    layout: str


class Written(NamedTuple):
    """Results of `queries`: absorbed queries [T, H, L + R], and the cache with the new tokens written."""

    absorbed: jax.Array
    cache: jax.Array


def why_not_dtypes(x: Any, *weights: Weight, norm: Norm | None = None) -> list[str]:
    """Why the kernels can't take these arrays, on jax's default device; empty if they can."""
    if reasons := device.why_not(record.FEW_TOKEN_MATMUL) + device.why_not_by_default():
        return reasons
    if x.dtype != jnp.bfloat16:
        return [f"activations are {x.dtype}; the kernels of few tokens take bfloat16"]
    if norm is not None and norm.weight.dtype != jnp.bfloat16:
        return [f"a norm's weight is {norm.weight.dtype}; the kernels of few tokens take bfloat16"]
    for weight in weights:
        if isinstance(weight, BlockScaled) and weight.products == "quantized":
            return ["products are quantized; the kernels of few tokens take activations as they are"]
        if not isinstance(weight, BlockScaled) and weight.dtype != jnp.bfloat16:
            return [f"a weight is {weight.dtype}; the kernels of few tokens take bfloat16 and block-scaled weights"]
    return []


def _values(weight: Weight) -> tuple[jax.Array, ...]:
    """The operands of a weight: its values, and its scales if it is block-scaled."""
    return (weight.values, weight.scales) if isinstance(weight, BlockScaled) else (weight,)


def weight_dtype(weight: Weight) -> str:
    """The name of a weight's dtype as the kernels know it: FP8 if it is block-scaled."""
    return FP8 if isinstance(weight, BlockScaled) else jnp.dtype(weight.dtype).name


def run(kernel: Kernel, spec: Any, inputs: tuple[Any, ...], *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Run the kernel as `spec` describes its call; the results have these shapes."""
    return kernel_call(kernel, kernel.config_for(spec), inputs, shapes, arch=device.arch_for(kernel))


# ---- a product


def _matmul_spec(x: Any, weight: Weight, norm: Norm | None, gated: bool, limit: float | None, add: bool) -> MatmulSpec:
    rows, terms = weight.shape
    eps = None if norm is None else norm.eps
    return MatmulSpec(x.shape[0], terms, rows, weight_dtype(weight), eps, gated, limit, add)


def why_not_matmul(x: Any, weight: Weight, norm: Norm | None = None, *, gated: bool = False) -> list[str]:
    """Why `matmul` of these arguments can't be one kernel; empty if it can."""
    if reasons := why_not_dtypes(x, weight, norm=norm):
        return reasons
    spec = _matmul_spec(x, weight, norm, gated, None, False)
    if reasons := record.FEW_TOKEN_MATMUL.reasons(spec):
        return reasons
    if isinstance(weight, BlockScaled) and record.FEW_TOKEN_MATMUL.config_for(spec).form == REGISTERS:
        most = MOST_TERMS if norm is None else MOST_NORMED_TERMS
        return [f"block_scaled_matmul reads e4m3 weights faster, except for one token of at most {most} terms"]
    return []


def matmul(
    x: jax.Array,
    weight: Weight,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    limit: float | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """The RMS norm of x, or x if `norm` is None, times the transpose of a weight, plus the residual if there is one.

    Args:
      x: [T, K], or wider rows that begin with these columns.
      weight: [N, K], bf16 or block-scaled.
      norm: None for no norm.
      gated: whether the result is silu(gate) * up, [T, N / 2]: gate is the product with the weight's first N / 2 rows,
        up the one with its last N / 2 rows.
      limit: if gated, `gate` is clipped to at most limit, and `up` to [-limit, limit]; None means no limit.
      residual: [T, N] or None.

    Returns:
      [T, N], gated [T, N / 2], in x's dtype, which the residual and a plain weight must have, too.
    """
    if why_not_matmul(x, weight, norm, gated=gated):
        normed = x[:, : weight.shape[1]]
        normed = normed if norm is None else rms_norm(normed, *norm)
        out = linear(normed, weight)
        out = _gated(out, limit) if gated else out
        return out if residual is None else residual + out
    spec = _matmul_spec(x, weight, norm, gated, limit, residual is not None)
    others = [] if norm is None else [norm.weight]
    others += [] if residual is None else [residual]
    columns = weight.shape[0] // (2 if gated else 1)
    return run(record.FEW_TOKEN_MATMUL, spec, (x, *_values(weight), *others), (x.shape[0], columns))[0]


def _gated(both: jax.Array, limit: float | None) -> jax.Array:
    gate, up = jnp.split(both, 2, axis=-1)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


# ---- experts


def why_not_experts(x: Any, gate_up: Weight, down: Weight, choices: int, norm: Norm | None = None) -> list[str]:
    """Why `experts_up` and `experts_down` of these arguments can't be two kernels; empty if they can."""
    if reasons := why_not_dtypes(x, gate_up, down, norm=norm):
        return reasons
    _, hidden, width = down.shape
    specs = [ExpertsSpec(x.shape[0], choices, hidden, width, weight_dtype(weight)) for weight in (gate_up, down)]
    return list(dict.fromkeys(reason for spec in specs for reason in record.FEW_TOKEN_EXPERTS_UP.reasons(spec)))


def experts_up(
    x: jax.Array, gate_up: Weight, experts: jax.Array, *, norm: Norm | None = None, limit: float | None = None
) -> jax.Array:
    """The gated first products of each token's experts with the RMS norm of x, or with x if `norm` is None.

    Args:
      x: [T, C].
      gate_up: [E, 2 I, C].
      experts: [T, P] i32; an index past the last expert stands for no expert.
      norm, limit: as in `matmul`.

    Returns:
      [T P, I] in x's dtype; rows without an expert hold any values.
    """
    tokens, choices = experts.shape
    count, width, hidden = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    if why_not_dtypes(x, gate_up, norm=norm) or record.FEW_TOKEN_EXPERTS_UP.reasons(
        ExpertsSpec(tokens, choices, hidden, width, weight_dtype(gate_up))
    ):
        normed = x if norm is None else rms_norm(x, *norm)
        own = widened(_chosen(gate_up, experts, count), x.dtype)
        return _gated(jnp.einsum("tc,tpic->tpi", normed, own), limit).reshape(tokens * choices, width)
    spec = ExpertsSpec(tokens, choices, hidden, width, weight_dtype(gate_up), None if norm is None else norm.eps, limit)
    others = () if norm is None else (norm.weight,)
    inputs = (x, *_values(gate_up), *others, experts)
    return run(record.FEW_TOKEN_EXPERTS_UP, spec, inputs, (tokens * choices, width))[0]


def _chosen(stack: Weight, experts: jax.Array, count: int) -> Weight:
    """The matrices of each token's experts, [T, P, ...]; some expert's matrix where a token has no expert."""
    chosen: Weight = jax.tree.map(lambda weight: weight[jnp.clip(experts, 0, count - 1)], stack)
    return chosen


def experts_down(
    inner: jax.Array, down: Weight, experts: jax.Array, weights: jax.Array, *, residual: jax.Array | None = None
) -> jax.Array:
    """The weighted sum of each token's experts' second products, plus the residual.

    Args:
      inner: [T P, I], as `experts_up` returns it.
      down: [E, C, I].
      experts: [T, P] i32, as in `experts_up`.
      weights: f32 [T, P].
      residual: [T, C] or None.

    Returns:
      [T, C] in inner's dtype.
    """
    tokens, choices = experts.shape
    count, hidden, width = down.shape
    spec = ExpertsSpec(tokens, choices, hidden, width, weight_dtype(down), residual=residual is not None)
    if why_not_dtypes(inner, down) or record.FEW_TOKEN_EXPERTS_DOWN.reasons(spec):
        own = widened(_chosen(down, experts, count), inner.dtype)
        each = jnp.einsum("tpi,tpci->tpc", inner.reshape(tokens, choices, width), own).astype(jnp.float32)
        exists = (experts >= 0) & (experts < count)
        total = jnp.where(exists[:, :, None], each * weights[:, :, None], 0).sum(axis=1)
        return (total if residual is None else residual + total).astype(inner.dtype)
    inputs = (inner, *_values(down), experts, weights, *(() if residual is None else (residual,)))
    return run(record.FEW_TOKEN_EXPERTS_DOWN, spec, inputs, (tokens, hidden))[0]


class Chosen(NamedTuple):
    """Results of `choose_up_by_kernel`: inner [P, I], as in `experts_up`; experts [1, P] i32 and weights [1, P] f32."""

    inner: jax.Array
    experts: jax.Array
    weights: jax.Array


def why_not_choose_up(x: Any, gate_up: Weight, spec: ChoiceSpec, norm: Norm | None = None) -> list[str]:
    """Why `choose_up_by_kernel` can't run; empty if it can."""
    if x.shape[0] != 1:
        return [f"there are {x.shape[0]} tokens; few_token_choose_up takes one"]
    return why_not_dtypes(x, gate_up, norm=norm) or record.FEW_TOKEN_CHOOSE_UP.reasons(spec)


def choose_up_by_kernel(
    x: jax.Array,
    gate_up: Weight,
    logits: jax.Array,
    bias: jax.Array | None,
    spec: ChoiceSpec,
    *,
    norm: Norm | None = None,
    down: Weight | None = None,
) -> Chosen:
    """The choice of one token's experts, and `experts_up` of them, in one kernel.

    Args:
      x: [1, C].
      gate_up: [E + S, 2 I, C], the routed experts and after them the spec.num_shared shared ones.
      logits: f32 [1, E], as `router_logits` returns them.
      bias: f32 [E], with the routing noaux_tc, and only then.
      spec: how the token chooses.
      norm: as in `experts_up`.
      down: the weights that `experts_down` will take, in gate_up's dtype. The kernel may then begin to bring them to
        the L2 cache.
    """
    others = [] if norm is None else [norm.weight]
    biases = [] if bias is None else [bias.astype(jnp.float32)]
    choices = spec.top_k + spec.num_shared
    spec = dataclasses.replace(spec, ahead=down is not None)
    ahead = record.FEW_TOKEN_CHOOSE_UP.config_for(spec).ahead
    brought = [] if down is None or not ahead else [_values(down)[0]]
    inputs = (x, *_values(gate_up), *others, logits, *biases, *brought)
    shapes = ((choices, spec.width), (1, choices), (1, choices))
    return Chosen(*run(record.FEW_TOKEN_CHOOSE_UP, spec, inputs, *shapes))


def router_logits(x: jax.Array, router: jax.Array, *, norm: Norm | None = None) -> jax.Array:
    """x [T, C], after the RMS norm if there is one, times the transpose of router [E, C]: f32 [T, E], as exact as
    products in float32."""
    spec = RouterSpec(x.shape[0], x.shape[1], router.shape[0], None if norm is None else norm.eps)
    if why_not_dtypes(x, norm=norm) or router.dtype != jnp.float32 or record.FEW_TOKEN_ROUTER.reasons(spec):
        normed = x if norm is None else rms_norm(x, *norm)
        wide = [array.astype(jnp.float32) for array in (normed, router)]
        return jnp.einsum("tc,ec->te", *wide, precision="highest")
    inputs = (x, router) if norm is None else (x, router, norm.weight)
    return run(record.FEW_TOKEN_ROUTER, spec, inputs, (x.shape[0], router.shape[0]))[0]


# ---- attention


def _queries_spec(x: Any, w_uk: Any, rope: Rope, norm: Norm, kv_cache: Any, quantises: bool) -> QueriesSpec:
    heads, latent, nope = w_uk.shape
    q_dtype = FP8 if quantises else jnp.dtype(x.dtype).name
    sizes = (heads, nope, latent, 2 * rope.cos.shape[-1])
    kv_dtype = jnp.dtype(kv_cache.dtype).name
    return QueriesSpec(x.shape[0], *sizes, q_dtype, kv_dtype, rope.interleave, rope.layout, norm.eps)


def why_not_queries(x: Any, w_uk: Any, rope: Rope, norm: Norm, kv_cache: Any, *, quantises: bool = False) -> list[str]:
    """Why `queries` of these arguments can't be one kernel; empty if it can.

    quantises: whether there is a q_scale.
    """
    if reasons := why_not_dtypes(x, w_uk, norm=norm):
        return reasons
    return record.FEW_TOKEN_QUERIES.reasons(_queries_spec(x, w_uk, rope, norm, kv_cache, quantises))


def queries(
    q: jax.Array,
    joint: jax.Array,
    w_uk: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    norm: Norm,
    rope: Rope,
    q_scale: float | jax.Array | None = None,
    kv_scale: float | jax.Array | None = None,
) -> Written:
    """Absorbed queries, and the cache with the new tokens' latents and rotated k_rope. The cache may have V3.2's packed
    rows.

    Args:
      q: [T, H (N + R)], a head's columns without rope first, or wider rows that begin with these.
      joint: [T, L + R or more], whose rows end with the latent before its norm and k_rope before its rotation.
      w_uk: [H, L, N].
      kv_cache: [P, Z, L + R], or uint8 [P, Z, 656] of packed rows.
      slot_mapping: [T] i32, as in `tsmla_jax.write_kv_cache`.
      norm: the norm of the latent.
      rope: the rotation of the queries and of k_rope.
      q_scale: quantises the queries to float8_e4m3fn (q / q_scale); None leaves them in q's dtype.
      kv_scale: the scale of a plain fp8 cache, or None.
    """
    heads, latent, nope = w_uk.shape
    width = latent + 2 * rope.cos.shape[-1]
    if why_not_queries(q, w_uk, rope, norm, kv_cache, quantises=q_scale is not None):
        own = q[:, : heads * (nope + width - latent)].reshape(q.shape[0], heads, nope + width - latent)
        turned: dict[str, Any] = {"interleave": rope.interleave, "layout": rope.layout}
        q_rope = rotate(own[..., nope:], rope.cos[:, None], rope.sin[:, None], **turned)
        absorbed = jnp.concatenate([jnp.einsum("thn,hln->thl", own[..., :nope], w_uk), q_rope], axis=-1)
        row, k_rope = joint[:, -width : -width + latent], joint[:, -width + latent :]
        if kv_cache.dtype == jnp.uint8:
            given = kv_cache, rms_norm(row, *norm), k_rope, slot_mapping, rope.cos, rope.sin
            turn: dict[str, Any] = {"rope_interleave": rope.interleave, "rope_layout": rope.layout}
            return Written(quantize_q(absorbed, q_scale), sparse.write_packed_kv_cache(*given, **turn))
        k_rope = rotate(k_rope, rope.cos, rope.sin, **turned)
        cache = write_kv_cache(kv_cache, rms_norm(row, *norm), k_rope, slot_mapping, kv_scale=kv_scale)
        return Written(quantize_q(absorbed, q_scale), cache)
    spec = _queries_spec(q, w_uk, rope, norm, kv_cache, q_scale is not None)
    scales = scale_operand(q_scale), scale_operand(kv_scale)
    inputs = (q, joint, w_uk, norm.weight, rope.cos, rope.sin, slot_mapping, *scales, kv_cache)
    return Written(*run(record.FEW_TOKEN_QUERIES, spec, inputs, (q.shape[0], heads, width), kv_cache.shape))


class LayerNorm(NamedTuple):
    """A layer norm's weight [D] and bias [D], and its eps, which is static."""

    weight: jax.Array
    bias: jax.Array
    eps: float


def _decode_arguments(absorbed: Any, kv_cache: Any, tables: Any, lens: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a dense `tsmla_jax.mla_decode`, by name."""
    given = {"q": absorbed, "kv_cache": kv_cache, "block_tables": tables, "seq_lens": lens, **options}
    absent = dict.fromkeys(("cu_seqlens_q", "max_q_len", "visible_lens"))
    flags = dict.fromkeys(("return_lse", "batch_invariant", "fp8_probabilities"), False)
    return {**given, **absent, **flags, "causal": True}


def _values_spec(spec: DecodeSpec, w_uv: Any) -> ValuesSpec:
    shape = decode_config(spec).shape
    sizes = (spec.batch, shape.num_heads, shape.latent_dim, w_uv.shape[1], shape.tile_rows)
    return ValuesSpec(*sizes, shape.partial_dtype, shape.partial_is_lane_order)


def why_not_attend(
    absorbed: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, w_uv: Any, **options: Any
) -> list[str]:
    """Why `attend_by_kernel` can't run; empty if it can."""
    if absorbed.shape[:2] != (1, 1):
        return [f"there are {absorbed.shape[0] * absorbed.shape[1]} tokens; few_token_values takes one"]
    if reasons := device.why_not(record.FEW_TOKEN_VALUES) + device.why_not_by_default():
        return reasons
    spec = OPERATION.spec(**_decode_arguments(absorbed, kv_cache, block_tables, seq_lens, options))
    if reasons := cute.why_not(spec):
        return reasons
    if w_uv.dtype != jnp.bfloat16 or 0 in (spec.max_pages, spec.num_pages):
        pages = f"block_tables have {spec.max_pages} columns and the cache {spec.num_pages} pages"
        return [f"w_uv is {w_uv.dtype}, {pages}; few_token_values takes bfloat16, and at least 1 of either"]
    return record.FEW_TOKEN_VALUES.reasons(_values_spec(spec, w_uv))


def attend_by_kernel(
    absorbed: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    w_uv: jax.Array,
    **options: Any,
) -> jax.Array:
    """Attention of one token, and the product of each head's result with W_UV: [1, H V].

    mla_decode's first kernel attends; few_token_values merges its pieces and multiplies them by W_UV.

    Args:
      absorbed: [1, 1, H, L + R], the absorbed queries that `queries` returns for one token.
      kv_cache, block_tables, seq_lens: as in `tsmla_jax.mla_decode`.
      w_uv: [H, V, L].
      options: softmax_scale, latent_dim, q_scale and kv_scale of `tsmla_jax.mla_decode`, all four.
    """
    spec = OPERATION.spec(**_decode_arguments(absorbed, kv_cache, block_tables, seq_lens, options))
    lens = checks.decode(spec, seq_lens, block_tables, None)
    kv_scale = options["kv_scale"]
    scales = Scales(options["softmax_scale"], options["q_scale"], kv_scale, kv_scale)
    pieces = cute.unmerged(absorbed, kv_cache, block_tables, lens, scales, spec=spec)
    heads, rows, _ = w_uv.shape
    return run(record.FEW_TOKEN_VALUES, _values_spec(spec, w_uv), (*pieces, w_uv), (1, heads * rows))[0]


def why_not_index_keys(keys: Any, rope: Rope, norm: LayerNorm, k_cache: Any) -> list[str]:
    """Why `write_index_keys_by_kernel` of these arguments can't run; empty if it can."""
    unable = device.why_not(record.FEW_TOKEN_INDEX_KEY) + device.why_not_by_default()
    if unable or keys.dtype != jnp.bfloat16 or k_cache.dtype != jnp.uint8:
        return unable or [f"keys are {keys.dtype}, and cached as {k_cache.dtype}; legal: bfloat16, and uint8"]
    if (found := (keys.shape[1], k_cache.shape[2])) != (legal := (INDEXER.head_dim, INDEXER.row_bytes)):
        got = f"keys have {found[0]} columns, and rows of their cache {found[1]} bytes"
        return [f"{got}; few_token_index_key takes {legal[0]} and {legal[1]}"]
    if k_cache.shape[1] % 2:  # a page would begin at a multiple of 4 bytes, and a lane stores 8 at once
        return [f"page_size (Z) is {k_cache.shape[1]}; few_token_index_key takes even page sizes"]
    return record.FEW_TOKEN_INDEX_KEY.reasons(_index_key_spec(keys, rope, norm))


def _index_key_spec(keys: Any, rope: Rope, norm: LayerNorm) -> IndexKeySpec:
    return IndexKeySpec(keys.shape[0], jnp.dtype(norm.weight.dtype).name, 2 * rope.cos.shape[-1], rope.layout, norm.eps)


def write_index_keys_by_kernel(
    k_cache: jax.Array, keys: jax.Array, slot_mapping: jax.Array, *, norm: LayerNorm, rope: Rope
) -> jax.Array:
    """The packed cache of indexer keys with new keys written after their layer norm, in one kernel: what
    `tsmla_jax.sparse.write_indexer_cache` gives for the normed keys.

    Args:
      k_cache: uint8 [P, Z, 132].
      keys: [T, 128], before their norm.
      slot_mapping: [T] i32.
      norm: the layer norm of the keys.
      rope: the rotation of the keys' first columns.
    """
    inputs = (keys, norm.weight, norm.bias.astype(norm.weight.dtype), rope.cos, rope.sin, slot_mapping, k_cache)
    return run(record.FEW_TOKEN_INDEX_KEY, _index_key_spec(keys, rope, norm), inputs, k_cache.shape)[0]
