"""TokenSpeed's kernels emulated on a CPU, with their results and their faults.

Whole key tiles are read; masked keys have the weight 0, and 0 times NaN is NaN; a page outside the cache reads as
zeros; lse has base 2; rows that are not written stay NaN. A row that sees no key is left NaN here, although the package
promises 0, so that a test finds code that relies on the promise.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tsmla_jax.ops.ragged import row_owner
from tsmla_kernels.kernel import Kernel
from tsmla_kernels.sm100 import config as sm100

LOG2_E = 1.4426950408889634


def kernel_call(
    kernel: Kernel, config: Any, inputs: Sequence[jax.Array], result_shapes: Sequence[tuple[int, ...]], *, arch: str
) -> list[jax.Array]:
    """In the place of tsmla_jax.ops.kernel_call.kernel_call."""
    operands = kernel.operands(config)
    arrays: dict[str, Any] = {}
    for operand, array in zip((o for o in operands if not o.output), inputs, strict=True):
        operand.check(array.shape, jnp.dtype(array.dtype).name)
        arrays[operand.name] = array
    outputs = [operand for operand in operands if operand.output]
    shapes = {operand.name: shape for operand, shape in zip(outputs, result_shapes, strict=True)}
    for operand in outputs:
        operand.check(shapes[operand.name], operand.dtype)
    scales = arrays.get("scales")
    if scales is None:
        halves = [shapes[name][0] - 1 for name in sm100.SCALE_OPERANDS]
        words = (halves[0] << 16 | halves[1], halves[2] << 16 | halves[3])
        scales = struct.unpack("<2f", struct.pack("<2I", *words))
    emulate = {"mla_decode_sm100": decode, "mla_prefill_sm100": prefill}[kernel.name]
    out, lse = emulate(config, arrays, scales, shapes)
    dtype = next(operand.dtype for operand in operands if operand.name == "out")
    rest = [jnp.full(shape, 77, "int8") for shape in result_shapes[2:]]
    return [out.astype(dtype).reshape(shapes["out"]), lse.reshape(shapes["lse"]), *rest]


def decode(
    config: sm100.DecodeConfig, arrays: dict[str, Any], scales: Any, shapes: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    q, cache, table = arrays["q"], arrays["kv_cache"], arrays["block_tables"]
    lens, visible = arrays["seq_lens"], arrays["visible_lens"]
    batch, width = table.shape
    assert q.shape[:3] == (batch, config.max_q_len, config.num_heads) and visible.shape == q.shape[:2]
    assert width * config.page_size % sm100.KEY_TILE == 0, "a tile's pages are read from the table all together"
    assert shapes["workspace"][1] >= sm100.LEAST_WORKSPACE

    there = (table >= 0) & (table < cache.shape[0])
    keys = jnp.where(there[..., None, None], cache[jnp.where(there, table, 0)].astype(jnp.float32), 0)
    keys = keys.reshape(batch, width * config.page_size, 576)
    position = jnp.arange(keys.shape[1])
    loaded = position < -(-lens[:, None] // sm100.KEY_TILE) * sm100.KEY_TILE
    keys = jnp.where(loaded[..., None], keys, 0)
    scores = jnp.einsum("bshd,bkd->bshk", q.astype(jnp.float32), keys, precision="highest")
    scores = jnp.where((position < visible[..., None])[:, :, None], scores * scales[0], -jnp.inf)
    out, lse = softmax(scores, "bshk,bkv->bshv", keys[..., : sm100.LATENT_DIM], scales[1])
    return out, lse * LOG2_E


def prefill(
    config: sm100.PrefillConfig, arrays: dict[str, Any], scales: Any, shapes: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    q, k, v = (arrays[name].astype(jnp.float32) for name in ("q", "k", "v"))
    starts, kv_starts = arrays["cu_seqlens_q"], arrays["cu_seqlens_kv"]
    n, m = jnp.diff(starts), jnp.diff(kv_starts)
    tile = jnp.arange(-(-shapes["longest_q"][0] // sm100.PREFILL_ROWS)) * sm100.PREFILL_ROWS
    hangs = jnp.zeros((), bool)
    if config.causal:  # a tile of queries that has work, although none of its queries sees a key
        last = tile + sm100.PREFILL_ROWS + (m - n)[:, None]
        hangs = ((tile < n[:, None]) & (m > 0)[:, None] & (last <= 0)).any()

    request, position, owned = row_owner(starts, q.shape[0])
    written = owned & (position < tile.shape[0] * sm100.PREFILL_ROWS)
    n, m, kv_start = n[request], m[request], kv_starts[request]
    k, v = (jnp.pad(x, ((0, sm100.KEY_TILE), (0, 0), (0, 0))) for x in (k, v))  # rows that aren't there are zeros
    key = jnp.arange(k.shape[0]) - kv_start[:, None]
    visible = (key >= 0) & (key < m[:, None])
    if config.causal:
        visible &= key <= (position + m - n)[:, None]
    read = (key >= 0) & (key < (-(-m // sm100.KEY_TILE) * sm100.KEY_TILE)[:, None])
    scores = jnp.einsum("qhd,khd->qhk", q, k, precision="highest") * scales[0]
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    out, lse = softmax(scores, "qhk,khv->qhv", jnp.nan_to_num(v), scales[1])
    spoiled = (read @ jnp.isnan(v).any((1, 2)).astype(jnp.float32)) > 0
    out, lse = jnp.where(spoiled[:, None, None], jnp.nan, out), jnp.where(m[:, None] > 0, lse, -jnp.inf)
    out = jnp.where(m[:, None, None] > 0, out, 0)
    # A kernel that waits for ever has no result at all.
    written &= ~hangs
    return jnp.where(written[:, None, None], out, jnp.nan), jnp.where(written[:, None], lse, jnp.nan)


def softmax(scores: jax.Array, product: str, values: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
    """out and lse, natural, of scores [..., k]; a row of -inf gives NaN."""
    maximum = scores.max(-1)
    weights = jnp.exp(scores - maximum[..., None])  # of a row that sees nothing: -inf - -inf
    total = weights.sum(-1)
    out = jnp.einsum(product, weights, values, precision="highest") / total[..., None] * scale
    return out, maximum + jnp.log(total)
