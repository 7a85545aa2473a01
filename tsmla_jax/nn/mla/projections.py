"""The MLA layer's parameters as a step reads them, and the layer's projections before and after attention.

Axes and parameters are those of `tsmla_jax.nn.functional`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.nn import batch_invariant
from tsmla_jax.nn.batch_invariant import BatchInvariant
from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.mla.config import MLAConfig
from tsmla_jax.nn.mla.rope import apply_rope
from tsmla_jax.nn.norms import rms_norm
from tsmla_jax.nn.products.linear import contract, joined_rows, linear, product, rows_of, split_rows, weight_of


def fold(params: Params, config: MLAConfig) -> dict[str, jax.Array]:
    """The parameters of a layer as a step reads them fastest, for `decode`, `prefill` and `prefill_with_context`.

    The last axis of every matrix is the one that a product sums over, so that a single token's product is a sum along
    rows. The first product of the queries and kv_a_proj_with_mqa are one, in_proj [A + L + R, E], with A = rank or
    H (N + R); their biases are one, in_proj_bias. q_b_proj becomes [H (N + R), rank], o_proj [E, H V], w_uk [H, L, N],
    and g_proj [H, E] or [H V, E]; w_uk and w_uv side by side are w_ukv [H, N + V, L]. Functions recognise folded
    parameters by in_proj. Folded parameters can't be split over heads. Block-scaled weights stay block-scaled; in_proj
    is so if both its parts are, and A is a multiple of 128.
    """
    first = "q_proj" if config.q_lora_rank is None else "q_a_proj"
    folded = dict(params)
    parts = [rows_of(folded.pop(name)) for name in (first, "kv_a_proj_with_mqa")]
    folded["in_proj"] = joined_rows(parts)
    if config.attention_bias:
        rest = jnp.zeros(config.num_attention_heads * config.qk_head_dim) if config.q_lora_rank is None else None
        bias = [folded.pop("q_a_proj_bias") if rest is None else rest, folded.pop("kv_a_proj_with_mqa_bias")]
        folded["in_proj_bias"] = jnp.concatenate([part.astype(bias[1].dtype) for part in bias])
    if "q_b_proj" in folded:
        folded["q_b_proj"] = rows_of(folded["q_b_proj"])
    folded["o_proj"] = rows_of(folded["o_proj"], inputs=2)
    if config.output_gate is not None:
        folded["g_proj"] = rows_of(folded["g_proj"])
    folded["w_ukv"] = jnp.concatenate([params["w_uk"], params["w_uv"]], axis=1)
    folded["w_uk"] = params["w_uk"].swapaxes(1, 2)
    return folded


def unfold(params: Params, config: MLAConfig) -> dict[str, Any]:
    """The inverse of `fold`; exact to the bit if all parameters had one dtype. Weights that are block-scaled when
    folded stay block-scaled.
    """
    unfolded = dict(params)
    bias = unfolded.pop("in_proj_bias", None)
    first, kv_a = split_rows(unfolded.pop("in_proj"), -config.cache_dim)
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    if config.q_lora_rank is None:
        unfolded["q_proj"] = weight_of(first, config.hidden_size, heads, config.qk_head_dim)
    else:
        unfolded["q_a_proj"] = weight_of(first, config.hidden_size, config.q_lora_rank)
        unfolded["q_b_proj"] = weight_of(params["q_b_proj"], config.q_lora_rank, heads, config.qk_head_dim)
    unfolded["kv_a_proj_with_mqa"] = weight_of(kv_a, config.hidden_size, config.cache_dim)
    unfolded["o_proj"] = weight_of(params["o_proj"], heads, config.v_head_dim, config.hidden_size)
    if config.output_gate is not None:
        each = (heads,) if config.output_gate == "head" else (heads, config.v_head_dim)
        unfolded["g_proj"] = weight_of(params["g_proj"], config.hidden_size, *each)
    unfolded["w_uk"] = params["w_uk"].swapaxes(1, 2)
    unfolded["w_uv"] = unfolded.pop("w_ukv")[:, nope:]
    if bias is not None:
        if config.q_lora_rank is not None:
            unfolded["q_a_proj_bias"] = bias[: -config.cache_dim]
        unfolded["kv_a_proj_with_mqa_bias"] = bias[-config.cache_dim :]
    return unfolded


def _joint_product(params: Params, config: MLAConfig, x: jax.Array) -> jax.Array:
    """x times in_proj of folded parameters, plus in_proj_bias if there is one, [..., A + L + R]. A layer asks for it in
    two places, and the compiler computes it once.
    """
    both = linear(x, params["in_proj"])
    return both + params["in_proj_bias"] if config.attention_bias else both


def _project_in(params: Params, config: MLAConfig, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x times the query's first matrix, [..., A], and x times kv_a_proj_with_mqa, [..., L + R], by folded parameters
    and with their biases, if there are any.
    """
    both = _joint_product(params, config, x)
    return both[..., : -config.cache_dim], both[..., -config.cache_dim :]


def _project_heads(params: Params, config: MLAConfig, x: jax.Array) -> jax.Array:
    """The heads' queries [..., H, N + R], by folded parameters without a low-rank query."""
    if config.cache_dim % config.qk_head_dim:
        q, _ = _project_in(params, config, x)
        return _by_head(q, config)
    # Latent and rope columns are together as wide as some number of heads. If they are cut off along the axis of heads,
    # the next product reads the query in place; if they are cut off along columns, XLA copies the query first.
    both = _by_head(_joint_product(params, config, x), config)
    return both[..., : -(config.cache_dim // config.qk_head_dim), :]


def _by_head(columns: jax.Array, config: MLAConfig) -> jax.Array:
    """Columns [..., H (N + R)] as [..., H, N + R]."""
    return columns.reshape(*columns.shape[:-1], columns.shape[-1] // config.qk_head_dim, config.qk_head_dim)


def project_q(
    params: Params,
    config: MLAConfig,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Queries of tokens x [..., E], with rope applied: q_nope [..., H, N] and q_rope [..., H, R].

    cos and sin are f32 [..., R / 2] (`rope_cos_sin`); one pair serves a whole model's layers. scale is f32 [...]
    (`query_scale`), or None if the config has no query_scale.
    """
    if config.q_lora_rank is not None:
        low = project_low_rank_q(params, config, x)
        q = product(params, "q_b_proj", low)
    else:
        q = _project_heads(params, config, x) if "in_proj" in params else contract(x, params["q_proj"])
    q = q if q.ndim > x.ndim else _by_head(q, config)
    return rotated_q(config, q if scale is None else scaled_q(q, scale[..., None]), cos, sin)


def scaled_q(q: jax.Array, scale: jax.Array) -> jax.Array:
    """Queries [..., C] times their factors f32 [...], rounded once."""
    return (q.astype(jnp.float32) * scale[..., None]).astype(q.dtype)


def rotated_q(config: MLAConfig, q: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Heads' queries [..., H, N + R] as q_nope, and q_rope with rope applied."""
    q_nope, q_rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    return q_nope, apply_rope(config, q_rope, cos[..., None, :], sin[..., None, :])


def project_low_rank_q(params: Params, config: MLAConfig, x: jax.Array) -> jax.Array:
    """The normed low-rank query [..., rank] of tokens x [..., E], for a config with a q_lora_rank."""
    if "in_proj" in params:
        low, _ = _project_in(params, config, x)
    else:
        low = contract(x, params["q_a_proj"])
        if config.attention_bias:
            low = low + params["q_a_proj_bias"]
    return rms_norm(low, params["q_a_layernorm"], config.a_layernorm_eps)


def project_latent(
    params: Params, config: MLAConfig, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cached form of tokens x [..., E]: the normed latent [..., L] and the rotated k_rope [..., R]."""
    latent, k_rope = project_latent_unrotated(params, config, x)
    return latent, apply_rope(config, k_rope, cos, sin)


def project_latent_unrotated(params: Params, config: MLAConfig, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`project_latent` before its rotation, for a cache write that rotates."""
    if "in_proj" in params:
        _, joint = _project_in(params, config, x)
    else:
        joint = contract(x, params["kv_a_proj_with_mqa"])
        if config.attention_bias:
            joint = joint + params["kv_a_proj_with_mqa_bias"]
    latent, k_rope = jnp.split(joint, [config.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, params["kv_a_layernorm"], config.a_layernorm_eps)
    if config.latent_scale != 1:
        latent = (latent.astype(jnp.float32) * config.latent_scale).astype(latent.dtype)
    return latent, k_rope


def expand_joint_kv(params: Params, latent: jax.Array) -> jax.Array:
    """kv [T, H, N + V]: each head's keys without rope columns, and its values, side by side. `mla_prefill_kv` takes kv
    in this form, and Hopper's kernel reads it in place, if it takes the dtype and the widths.
    """
    both = params["w_ukv"] if "w_ukv" in params else jnp.concatenate([params["w_uk"], params["w_uv"]], axis=1)
    if isinstance(both, BatchInvariant):
        heads, columns, width = both.shape
        kv = batch_invariant.linear(latent, both.values.reshape(heads * columns, width))
        return kv.reshape(-1, heads, columns)
    return jnp.einsum("tl,hcl->thc", latent, both)


def project_values(params: Params, out: jax.Array) -> jax.Array:
    """The heads' outputs [..., H, V]: `out` [..., H, L], attention's results over latents, times W_UV."""
    weight = params["w_uv"]
    if isinstance(weight, BatchInvariant):
        values = batch_invariant.linear_by_heads(out.reshape(-1, *out.shape[-2:]), weight.values)
        return values.reshape(*out.shape[:-1], values.shape[-1])
    return jnp.einsum("...hl,hvl->...hv", out, weight)


def absorb_q(params: Params, q_nope: jax.Array, q_rope: jax.Array) -> jax.Array:
    """Absorbed queries [..., H, L + R]: q_nope W_UK, then q_rope. Raises a ValueError if q_nope has another N."""
    axes = "thn,hln->thl" if "in_proj" in params else "thn,hnl->thl"
    nope = params["w_uk"].shape[2 if "in_proj" in params else 1]
    if q_nope.shape[-1] != nope:
        raise ValueError(f"q_nope: got shape {q_nope.shape}; legal: [..., H, N] with N = {nope}, of w_uk")
    # Tokens get one axis: with two, XLA's GPU compiler joins the parts by a transpose, ten times slower for 64 tokens.
    tokens = [part.reshape(-1, *part.shape[-2:]) for part in (q_nope, q_rope)]
    if isinstance(weight := params["w_uk"], BatchInvariant):
        absorbed = batch_invariant.linear_by_heads(tokens[0], weight.values)
    else:
        absorbed = jnp.einsum(axes, tokens[0], weight)
    q = jnp.concatenate([absorbed, tokens[1]], axis=-1)
    return q.reshape(*q_nope.shape[:-1], q.shape[-1])


def project_out(params: Params, config: MLAConfig, heads: jax.Array, x: jax.Array | None = None) -> jax.Array:
    """The output projection [..., E] of heads' outputs [..., H, V]; under `shard_map` the partial sum of local heads.

    x: the layer's input [..., E]. With an output_gate it is needed: None is then a ValueError.
    """
    if config.output_gate is not None:
        heads = _gated(params, config, heads, needed_with_gate(x))
    if "in_proj" in params:
        y = linear(heads.reshape(*heads.shape[:-2], heads.shape[-2] * heads.shape[-1]), params["o_proj"])
    else:
        y = contract(heads, params["o_proj"], axes=2)
    if not config.attention_bias:
        return y
    bias = params["o_proj_bias"]
    if heads.shape[-2] != config.num_attention_heads:
        bias = bias * (heads.shape[-2] / config.num_attention_heads)  # the caller sums the devices' shares
    return y + bias


def needed_with_gate(x: jax.Array | None) -> jax.Array:
    """The layer's input, which `project_out` needs if there is an output_gate; a ValueError if it is None."""
    if x is None:
        raise ValueError("x: got None; legal with an output_gate: the layer's input [..., E]")
    return x


def _gated(params: Params, config: MLAConfig, heads: jax.Array, x: jax.Array) -> jax.Array:
    """The heads' outputs [..., H, V] times their gates, which are rounded to x's dtype first."""
    gate = linear(x, params["g_proj"]) if "in_proj" in params else contract(x, params["g_proj"])
    gate = jax.nn.sigmoid(gate.astype(jnp.promote_types(gate.dtype, jnp.float32))).astype(x.dtype)
    return heads * gate.reshape(*heads.shape[:-1], -1)
