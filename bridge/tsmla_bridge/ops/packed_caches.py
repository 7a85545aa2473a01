"""write_packed_kv_cache, write_indexer_cache and indexer_quantize on torch tensors: rope and quantisation of V3.2's
cached rows, of the indexer's keys and of its queries, and the writes into both caches.

On a Hopper GPU the catalog's kernels run the calls, one launch each; on Blackwell only where implementation="cute"
names them. Torch operations run the calls on CPUs, on other GPUs, and, unless "cute" is named, where the kernels can't
serve the call: a dtype, width or page size that sparse_cache.config refuses, a cache, list of slots, q or weights with
gaps, a cache, q or rows that don't start at multiples of 16 bytes. No call reads a value on the host, except under
TSMLA_CHECK=1 outside of a capture, so CUDA graphs can capture all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from tsmla_bridge import operators, sparse_reference
from tsmla_bridge.runtime import data_checks, loaded_kernels, tensors
from tsmla_kernels.catalog import INDEXER_QUANTIZE, WRITE_INDEXER_CACHE, WRITE_PACKED_KV_CACHE
from tsmla_kernels.contract import packed, rules, values
from tsmla_kernels.kernel import Config, Kernel
from tsmla_kernels.sparse_cache import config as packed_config


def write_packed_kv_cache(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    rope_interleave: bool = True,
    rope_layout: str = "interleaved",
    implementation: str | None = None,
) -> torch.Tensor:
    """V3.2 packed rows written into the slots of the cache, in place, as tsmla_jax.sparse.write_packed_kv_cache defines
    it.

    Args:
      kv_cache: uint8 [P, Z, 656] or [P, 1, Z, 656].
      latent: [T, 512] float16, bfloat16, float32 or float64, the normalised latents.
      k_rope: [T, 64] float16, bfloat16, float32 or float64.
      slot_mapping: [T] int32 or int64, as in write_kv_cache: slot = page * Z + offset; -1 skips the token. Slots must
        differ: two tokens of one slot may leave the latent of one with the scales of the other.
      cos, sin: [T, 32] float32 of each token's position: k_rope is rotated in float32 and rounded to its dtype first.
        Without cos and sin, k_rope must be rotated already.
      rope_interleave: whether the pairs of k_rope are columns 2i and 2i + 1; otherwise i and i + 32.
      rope_layout: "interleaved" or "halves", the order of the rotated columns in the cache.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: on Hopper the kernel if it can run,
        else torch operations.

    Returns:
      kv_cache itself.

    Raises:
      TypeError, ValueError, NotImplementedError, RuntimeError: as write_kv_cache says.
    """
    operators.refuse_derivative("write_packed_kv_cache", latent, k_rope, cos, sin)
    arguments = (kv_cache, latent, k_rope, slot_mapping, cos, sin, rope_interleave, rope_layout, implementation)
    if torch.compiler.is_compiling() or operators.is_traced(kv_cache, latent):
        torch.ops.tsmla.write_packed_kv_cache(*arguments)
    else:
        _write_packed(*arguments)
    return kv_cache


def _write_packed(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rope_interleave: bool,
    rope_layout: str,
    implementation: str | None,
) -> None:
    kv_cache = tensors.without_head_axis(kv_cache)
    arrays = {"kv_cache": kv_cache, "latent": latent, "k_rope": k_rope, "slot_mapping": slot_mapping}
    spec = tensors.describe_call(
        packed.packed_write_spec,
        **arrays,
        cos=cos,
        sin=sin,
        rope_interleave=rope_interleave,
        rope_layout=rope_layout,
        slot_dtypes=rules.SLOTS,
    )
    rows = {"latent": latent, "k_rope": k_rope, **_given(cos, sin)}

    def why_not() -> list[str]:
        read = {"kv_cache": kv_cache, "slot_mapping": slot_mapping, **rows}
        return WRITE_PACKED_KV_CACHE.reasons(spec) + loaded_kernels.layout_reasons(read, rows, ("kv_cache",))

    by_kernel = loaded_kernels.is_chosen(WRITE_PACKED_KV_CACHE, implementation, kv_cache.device, why_not)
    data_checks.check(values.slot_mapping, spec.cache.num_slots, slot_mapping)
    if spec.num_tokens == 0:
        return
    tensors.check_written("kv_cache", kv_cache)
    if not by_kernel:
        with torch.no_grad():
            sparse_reference.write_packed_kv_cache(spec, kv_cache, latent, k_rope, slot_mapping, cos, sin)
        return
    config = packed_config.packed_write_config(spec)
    tensors.mark_written(kv_cache)
    _launch(WRITE_PACKED_KV_CACHE, config, arrays | _given(cos, sin), {"new_kv_cache": kv_cache}, rows)


def write_indexer_cache(
    k_cache: torch.Tensor,
    k: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    rope_offset: int = 0,
    rope_layout: str = "halves",
    implementation: str | None = None,
) -> torch.Tensor:
    """Indexer keys written into the slots of their cache, in place, as tsmla_jax.sparse.write_indexer_cache defines it.

    Args:
      k_cache: uint8 [P, Z, Di + 4], a page's bytes Z keys of e4m3 and then Z scales of float32, with Z * Di a multiple
        of 4; or [P, Z, Di] float16, bfloat16, float32, float64 or float8_e4m3fn.
      k: [T, Di] float16, bfloat16, float32 or float64, normed.
      slot_mapping: as in write_packed_kv_cache; slots must differ.
      cos, sin: [T, R / 2] float32: columns [rope_offset, rope_offset + R) of k are rotated in float32 first. Without
        cos and sin, k must be rotated already.
      rope_offset: 0 in V3.2, Di - R in V4.
      rope_layout: "halves" (pairs i and i + R / 2) or "interleaved" (2i and 2i + 1).
      implementation: as in write_packed_kv_cache.

    Returns:
      k_cache itself.

    Raises:
      TypeError, ValueError, NotImplementedError, RuntimeError: as write_kv_cache says.
    """
    operators.refuse_derivative("write_indexer_cache", k_cache, k, cos, sin)
    arguments = (k_cache, k, slot_mapping, cos, sin, rope_offset, rope_layout, implementation)
    if torch.compiler.is_compiling() or operators.is_traced(k_cache, k):
        torch.ops.tsmla.write_indexer_cache(*arguments)
    else:
        _write_keys(*arguments)
    return k_cache


def _write_keys(
    k_cache: torch.Tensor,
    k: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rope_offset: int,
    rope_layout: str,
    implementation: str | None,
) -> None:
    arrays = {"k_cache": k_cache, "k": k, "slot_mapping": slot_mapping}
    spec = tensors.describe_call(
        packed.indexer_write_spec,
        **arrays,
        cos=cos,
        sin=sin,
        rope_offset=rope_offset,
        rope_layout=rope_layout,
        slot_dtypes=rules.SLOTS,
    )
    rows = {"k": k, **_given(cos, sin)}

    def why_not() -> list[str]:
        read = {"k_cache": k_cache, "slot_mapping": slot_mapping, **rows}
        return WRITE_INDEXER_CACHE.reasons(spec) + loaded_kernels.layout_reasons(read, rows, ("k_cache",))

    by_kernel = loaded_kernels.is_chosen(WRITE_INDEXER_CACHE, implementation, k_cache.device, why_not)
    data_checks.check(values.slot_mapping, spec.cache.as_plain().num_slots, slot_mapping)
    if spec.num_tokens == 0:
        return
    tensors.check_written("k_cache", k_cache)
    if not by_kernel:
        with torch.no_grad():
            sparse_reference.write_indexer_cache(spec, k_cache, k, slot_mapping, cos, sin)
        return
    config = packed_config.indexer_write_config(spec)
    tensors.mark_written(k_cache)
    _launch(WRITE_INDEXER_CACHE, config, arrays | _given(cos, sin), {"new_k_cache": k_cache}, rows)


def indexer_quantize(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    rope_offset: int = 0,
    rope_layout: str = "halves",
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indexer queries as e4m3, their scales and the logits' constants folded into the head weights, as
    tsmla_jax.sparse.indexer_quantize defines it.

    Args:
      q: [T, Hi, Di] float16, bfloat16, float32 or float64.
      weights: [T, Hi] float16, bfloat16, float32 or float64, the head weights as projected.
      cos, sin, rope_offset, rope_layout: as in write_indexer_cache, for q's columns.
      implementation: as in write_packed_kv_cache.

    Returns:
      q8 [T, Hi, Di] float8_e4m3fn and the folded weights [T, Hi] float32.

    Raises:
      TypeError, ValueError, NotImplementedError, RuntimeError: as write_kv_cache says.
    """
    operators.refuse_derivative("indexer_quantize", q, weights, cos, sin)
    arguments = (q, weights, cos, sin, rope_offset, rope_layout, implementation)
    traced = torch.compiler.is_compiling() or operators.is_traced(q, weights)
    return torch.ops.tsmla.indexer_quantize(*arguments) if traced else _quantize(*arguments)


def _quantize(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rope_offset: int,
    rope_layout: str,
    implementation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    spec = tensors.describe_call(
        packed.indexer_quantize_spec,
        q=q,
        weights=weights,
        cos=cos,
        sin=sin,
        rope_offset=rope_offset,
        rope_layout=rope_layout,
    )
    angles = _given(cos, sin)

    def why_not() -> list[str]:
        gaps = [] if weights.is_contiguous() else [loaded_kernels.unreadable("weights", weights)]
        reasons = INDEXER_QUANTIZE.reasons(spec)
        return reasons + loaded_kernels.layout_reasons({"q": q, **angles}, wide=angles) + gaps

    by_kernel = loaded_kernels.is_chosen(INDEXER_QUANTIZE, implementation, q.device, why_not)
    if not by_kernel or 0 in weights.shape:
        with torch.no_grad():
            return sparse_reference.indexer_quantize(spec, q, weights, cos, sin)
    results = q.new_empty(q.shape, dtype=torch.float8_e4m3fn), weights.new_empty(weights.shape, dtype=torch.float32)
    flat = {"q": q.detach().view(-1, spec.head_dim), "weights": weights.detach().view(-1), **angles}
    outputs = {"q8": results[0].view(-1, spec.head_dim), "folded_weights": results[1].view(-1)}
    _launch(INDEXER_QUANTIZE, packed_config.indexer_quantize_config(spec), flat, outputs, angles)
    return results


# ---- the kernels


def _given(cos: torch.Tensor | None, sin: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {} if cos is None or sin is None else {"cos": cos, "sin": sin}


def _launch(
    kernel: Kernel,
    config: Config,
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    wide: Collection[str],
) -> None:
    """Launch a kernel on the device of its inputs. Rows of the inputs named in `wide` may be the first columns of wider
    ones."""
    given = inputs | outputs
    arrays = {name: (loaded_kernels.wide_view if name in wide else loaded_kernels.view)(x) for name, x in given.items()}
    loaded_kernels.run_on(kernel, config, next(iter(inputs.values())).device, arrays)


# ---- the operators

packed_operator = operators.register(
    "write_packed_kv_cache",
    _write_packed,
    "(Tensor(a!) kv_cache, Tensor latent, Tensor k_rope, Tensor slot_mapping, Tensor? cos, Tensor? sin,"
    " bool rope_interleave, str rope_layout, str? implementation) -> ()",
    writes=("kv_cache",),
)
keys_operator = operators.register(
    "write_indexer_cache",
    _write_keys,
    "(Tensor(a!) k_cache, Tensor k, Tensor slot_mapping, Tensor? cos, Tensor? sin, int rope_offset, str rope_layout,"
    " str? implementation) -> ()",
    writes=("k_cache",),
)
quantize_operator = operators.register(
    "indexer_quantize",
    _quantize,
    "(Tensor q, Tensor weights, Tensor? cos, Tensor? sin, int rope_offset, str rope_layout, str? implementation)"
    " -> (Tensor, Tensor)",
)


def _fake_quantize(q: Any, weights: Any, *_: Any) -> Any:
    return q.new_empty(q.shape, dtype=torch.float8_e4m3fn), weights.new_empty(weights.shape, dtype=torch.float32)


operators.register_fake(quantize_operator, _fake_quantize)
