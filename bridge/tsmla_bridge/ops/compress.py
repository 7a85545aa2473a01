"""compress_write_kv_cache on torch tensors: V4's compressor with the norm, rope, quantisation and cache write of its
entries.

On a Hopper GPU, and on later ones (cache_ops.config.ARCHS) if "cute" is named, the catalog's kernel runs the call, one
launch. Torch operations run all other calls: on CPUs, on other GPUs, and, unless "cute" is named, where the kernel
can't serve the call: sizes or dtypes that sparse_cache.compress_config refuses, tensors that have gaps or, other than
those of int32, are not aligned to 16 bytes. No call reads a value on the host, except under TSMLA_CHECK=1 outside of a
capture, so CUDA graphs can capture all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from tsmla_bridge import compress_reference, operators
from tsmla_bridge.compress_reference import Arrays
from tsmla_bridge.runtime import data_checks, loaded_kernels, tensors
from tsmla_bridge.runtime.tensors import Scale
from tsmla_kernels.catalog import COMPRESS_WRITE_KV_CACHE
from tsmla_kernels.contract import values
from tsmla_kernels.contract.compress import CompressWriteSpec, compress_write_spec
from tsmla_kernels.sparse_cache.compress_config import compress_write_config

_WRITTEN = ("cache", "state", "state_positions")


def compress_write_kv_cache(
    cache: torch.Tensor,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    state_positions: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    state_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    ratio: int,
    overlap: bool,
    eps: float,
    kv_scale: Scale | None = None,
    page_size: int | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Pool the tokens of every window that the new tokens complete, norm, rotate and quantise the entries, and write
    them into the cache, as tsmla_jax.compress_write_kv_cache defines it. cache, state and state_positions are
    changed in place.

    Args:
      cache: uint8 [P, page_bytes] (V4 pages), uint8 [P, Z, C + 4] (the indexer's packed keys), or plain [P, Z, C] of
        float16, bfloat16, float32, float64 or float8_e4m3fn.
      kv_score: [T, 2, W] float32, kv and scores of the new tokens; W is C, or 2 C with overlap.
      ape: [ratio, W] float32.
      state: [N, ring, 2, W] float32, each request's last tokens; ring at least ratio, or 2 * ratio with overlap.
      state_positions: [N, ring] int32, their positions; -1 for none.
      norm_weight: [C] float16, bfloat16, float32 or float64.
      cos_sin: float32, a row of R for each position, R / 2 cosines, then R / 2 sines; an entry's last R channels are
        rotated.
      block_tables: [B, M] int32, pages of each request's entries. No two new entries may lie in one slot: what they
        leave there has no meaning.
      state_slots: [B] int32, the index of each request's state, -1 to leave none behind (its new tokens must start at
        position 0).
      seq_lens: [B] int32, tokens of each request, the new ones included.
      cu_seqlens_q: [B + 1] int32 from 0 on, where each request's new tokens start, and their end.
      ratio: tokens an entry.
      overlap: whether an entry pools the last 2 * ratio tokens, from two series of columns, and not the last ratio.
      eps: the norm's epsilon.
      kv_scale: the scale of a float8_e4m3fn cache; a number, or a float32 or float64 scalar tensor; None
        is 1.
      page_size: rows of a V4 page, 64 unless given; for other caches None or Z.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: on Hopper the kernel if it can run,
        else torch operations.

    Returns:
      cache itself.

    Raises:
      TypeError, ValueError, NotImplementedError, RuntimeError: as write_kv_cache says.
    """
    derivable = (cache, kv_score, ape, state, norm_weight, cos_sin, kv_scale)
    operators.refuse_derivative("compress_write_kv_cache", *derivable)
    arrays = Arrays(
        cache,
        state,
        state_positions,
        kv_score,
        ape,
        state_slots,
        seq_lens,
        cu_seqlens_q,
        norm_weight,
        cos_sin,
        block_tables,
    )
    if torch.compiler.is_compiling() or operators.is_traced(cache, kv_score):
        scale = operators.scale_arguments(kv_scale)
        options = (ratio, overlap, eps, page_size, *scale, implementation)
        torch.ops.tsmla.compress_write_kv_cache(*arrays, *options)
    else:
        _compress(arrays, ratio, overlap, eps, page_size, kv_scale, implementation)
    return cache


def _compress(
    arrays: Arrays,
    ratio: int,
    overlap: bool,
    eps: float,
    page_size: int | None,
    kv_scale: Scale | None,
    implementation: str | None,
) -> None:
    cache, lens, offsets = arrays.cache, arrays.seq_lens, arrays.cu_seqlens_q
    given = arrays._asdict()
    given["state_positions"] = given.pop("positions")
    spec = tensors.describe_call(
        compress_write_spec,
        **given,
        kv_scale=kv_scale,
        ratio=ratio,
        overlap=overlap,
        eps=eps,
        page_size=page_size,
        state_names=("state", "state_positions"),
    )

    def why_not() -> list[str]:
        return COMPRESS_WRITE_KV_CACHE.reasons(spec) + loaded_kernels.layout_reasons(given, written=_WRITTEN)

    by_kernel = loaded_kernels.is_chosen(COMPRESS_WRITE_KV_CACHE, implementation, cache.device, why_not)
    where = (lens, offsets, arrays.state_slots, arrays.positions, arrays.block_tables)
    data_checks.check(values.compress_write, spec, *where)
    if 0 in (spec.compress.num_tokens, spec.compress.num_requests):
        return
    for name in _WRITTEN:
        tensors.check_written(name, given[name])
    with torch.no_grad():
        if by_kernel:
            tensors.mark_written(arrays.cache, arrays.state, arrays.positions)
            _launch(spec, arrays, kv_scale)
        else:
            compress_reference.compress_write_kv_cache(spec, arrays, kv_scale)


def _launch(spec: CompressWriteSpec, arrays: Arrays, kv_scale: Scale | None) -> None:
    view = loaded_kernels.view
    row = arrays.state.shape[-1] * 2
    cache, positions = view(arrays.cache), view(arrays.positions)
    state = view(arrays.state, (*arrays.state.shape[:2], row))
    views = {name: view(x) for name, x in arrays._asdict().items() if name not in ("cache", "state", "positions")}
    views["kv_score"] = view(arrays.kv_score, (arrays.kv_score.shape[0], row))
    inputs = {"cache": cache, "state": state, "state_positions": positions, **views}
    outputs = {"new_cache": cache, "new_state": state, "new_positions": positions}
    config, device = compress_write_config(spec), arrays.cache.device
    loaded_kernels.run_scaled(COMPRESS_WRITE_KV_CACHE, config, device, kv_scale, inputs, outputs)


# ---- the operator


def _by_position(*arguments: Any) -> None:
    arrays, options = arguments[: len(Arrays._fields)], arguments[len(Arrays._fields) :]
    ratio, overlap, eps, page_size, *scale, implementation = options
    _compress(Arrays(*arrays), ratio, overlap, eps, page_size, operators.scale_of(*scale), implementation)


compress_operator = operators.register(
    "compress_write_kv_cache",
    _by_position,
    "(Tensor(a!) cache, Tensor(b!) state, Tensor(c!) state_positions, Tensor kv_score, Tensor ape, Tensor state_slots,"
    " Tensor seq_lens, Tensor cu_seqlens_q, Tensor norm_weight, Tensor cos_sin, Tensor block_tables, int ratio,"
    f" bool overlap, float eps, int? page_size, {operators.SCALE_SCHEMA}, str? implementation) -> ()",
    writes=_WRITTEN,
)
