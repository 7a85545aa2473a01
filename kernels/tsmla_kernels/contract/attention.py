"""What every MLA operation accepts and returns: frozen specs, shape and dtype rules, and the error texts.

Both front ends describe their arrays as `Array(shape, dtype)` with the dtype's name ("bfloat16") and call one function
per operation here, so a wrong argument reads the same from jax and from torch. This module imports neither. A shape
holds ints or the symbolic dimensions of `jax.export`; only the last axis (and the page size) must be ints.

Axes: B requests, S query tokens a request, T tokens over all requests, H query heads, L latent width, R rope width,
D = L + R, P pages, Z page size (tokens a page), M block-table width (pages a request at most).

Errors: TypeError for an argument that isn't an array or isn't static, ValueError for a shape, dtype or value that is
not legal. What a particular implementation can't run is that implementation's NotImplementedError, not decided here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tsmla_kernels.contract.rules import (
    FLOATS,
    FP8,
    FP8_MAX,
    SCALES,
    VALUES,
    Array,
    Dim,
    cache_shape,
    check_at_least_one,
    check_dtype,
    check_integers,
    check_rank,
    check_scale,
    check_static_last,
    listed,
    not_an_array,
    not_differentiable,
    not_runnable,
    show,
    static_bool,
    static_dim,
    static_int,
    table_shape,
    unknown_implementation,
)

__all__ = [
    "FLOATS",
    "FP8",
    "FP8_MAX",
    "SCALES",
    "VALUES",
    "Array",
    "CacheGatherSpec",
    "CacheWriteSpec",
    "DecodeSpec",
    "Dim",
    "MergeSpec",
    "PrefillSpec",
    "attention_out_dtype",
    "cache_gather_spec",
    "cache_write_spec",
    "decode_spec",
    "merge_spec",
    "not_an_array",
    "not_differentiable",
    "not_runnable",
    "prefill_spec",
    "static_bool",
    "static_dim",
    "static_int",
    "unknown_implementation",
]


@dataclass(frozen=True)
class DecodeSpec:
    """One call of mla_decode. For ragged queries max_q_len is the static bound on a request's query tokens and
    total_q_len is T; for uniform ones max_q_len is S and total_q_len is B * S."""

    batch: Dim
    total_q_len: Dim
    max_q_len: Dim
    num_heads: Dim
    latent_dim: int
    rope_dim: int
    num_pages: Dim
    page_size: int
    max_pages: Dim
    q_dtype: str
    kv_dtype: str
    ragged: bool
    causal: bool
    return_lse: bool
    batch_invariant: bool

    @property
    def head_dim(self) -> int:
        """D, the width of a row of the cache."""
        return self.latent_dim + self.rope_dim

    @property
    def out_dtype(self) -> str:
        return attention_out_dtype(self.q_dtype)

    @property
    def lse_dtype(self) -> str:
        return attention_lse_dtype(self.q_dtype)


@dataclass(frozen=True)
class PrefillSpec:
    """One call of mla_prefill: total_q_len and total_kv_len are Tq and Tk, the packed lengths."""

    batch: Dim
    total_q_len: Dim
    total_kv_len: Dim
    max_q_len: int
    max_kv_len: int
    num_heads: Dim
    qk_head_dim: int
    v_head_dim: int
    q_dtype: str
    kv_dtype: str
    causal: bool
    return_lse: bool

    @property
    def out_dtype(self) -> str:
        return attention_out_dtype(self.q_dtype)

    @property
    def lse_dtype(self) -> str:
        return attention_lse_dtype(self.q_dtype)


@dataclass(frozen=True)
class CacheWriteSpec:
    """One call of write_kv_cache."""

    num_tokens: Dim
    latent_dim: int
    rope_dim: int
    num_pages: Dim
    page_size: int
    in_dtype: str
    kv_dtype: str

    @property
    def head_dim(self) -> int:
        """D, the width of a row of the cache."""
        return self.latent_dim + self.rope_dim


@dataclass(frozen=True)
class CacheGatherSpec:
    """One call of gather_kv_cache; total_len is the static number of rows of the result."""

    batch: Dim
    total_len: Dim
    head_dim: int
    num_pages: Dim
    page_size: int
    max_pages: Dim
    kv_dtype: str
    out_dtype: str


@dataclass(frozen=True)
class MergeSpec:
    """One call of merge_attention_states; rows is the shape [..., H] of each lse."""

    num_parts: int
    rows: tuple[Dim, ...]
    head_dim: Dim
    out_dtype: str
    lse_dtype: str


def decode_spec(
    *,
    q: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    softmax_scale: Array | float,
    latent_dim: int = 512,
    cu_seqlens_q: Array | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    q_scale: Array | float | None = None,
    kv_scale: Array | float | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> DecodeSpec:
    """The spec of mla_decode, or ValueError / TypeError naming the argument that is not legal."""
    latent_dim = static_int("latent_dim", latent_dim, minimum=1)
    causal = static_bool("causal", causal)
    return_lse = static_bool("return_lse", return_lse)
    batch_invariant = static_bool("batch_invariant", batch_invariant)
    num_pages, page_size, head_dim = cache_shape(kv_cache)
    if latent_dim > head_dim:
        raise ValueError(f"latent_dim: got {latent_dim}; it must be at most kv_cache's last axis D = {head_dim}")
    batch, max_pages = table_shape(block_tables)
    check_integers("seq_lens", seq_lens, (batch,), "[B]", "B from block_tables")

    ragged = cu_seqlens_q is not None
    check_dtype("q", q, VALUES)
    if cu_seqlens_q is not None:
        check_rank("q", q, 3, "[T, H, D] (ragged, because cu_seqlens_q is given)")
        total_q_len, num_heads, q_dim = q.shape
        check_integers("cu_seqlens_q", cu_seqlens_q, (batch + 1,), "[B + 1]", "B from block_tables")
        if max_q_len is None:
            raise ValueError("max_q_len: got None; ragged queries (cu_seqlens_q is given) need it as a static int")
        max_q_len = static_int("max_q_len", max_q_len, minimum=1)
    else:
        check_rank("q", q, 4, "[B, S, H, D], or [T, H, D] with cu_seqlens_q")
        q_batch, q_len, num_heads, q_dim = q.shape
        if q_batch != batch:
            raise ValueError(f"q: got shape {show(q.shape)}; its B = {q_batch} must equal block_tables' B = {batch}")
        if max_q_len is not None:
            max_q_len = static_int("max_q_len", max_q_len, minimum=1)
            if max_q_len != q_len:
                raise ValueError(
                    f"max_q_len: got {max_q_len}; with q [B, S, H, D] it must be None or S = {q_len}"
                    " (queries of different lengths are passed as [T, H, D] with cu_seqlens_q)"
                )
        max_q_len, total_q_len = q_len, q_batch * q_len
    if q_dim != head_dim:
        raise ValueError(
            f"q: got shape {show(q.shape)}; its last axis must equal kv_cache's D = {head_dim}"
            " (latent first, rope last)"
        )
    check_at_least_one("q", q.shape, -2, "H")
    _check_kv_dtype(q.dtype, kv_cache.dtype)
    check_scale("softmax_scale", softmax_scale, optional=False)
    check_scale("q_scale", q_scale)
    check_scale("kv_scale", kv_scale)
    return DecodeSpec(
        batch=batch,
        total_q_len=total_q_len,
        max_q_len=max_q_len,
        num_heads=num_heads,
        latent_dim=latent_dim,
        rope_dim=head_dim - latent_dim,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=max_pages,
        q_dtype=q.dtype,
        kv_dtype=kv_cache.dtype,
        ragged=ragged,
        causal=causal,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
    )


def prefill_spec(
    *,
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_kv: Array,
    max_q_len: int,
    max_kv_len: int,
    softmax_scale: Array | float,
    causal: bool = True,
    q_scale: Array | float | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    return_lse: bool = False,
) -> PrefillSpec:
    """The spec of mla_prefill, or ValueError / TypeError naming the argument that is not legal."""
    causal = static_bool("causal", causal)
    return_lse = static_bool("return_lse", return_lse)
    max_q_len = static_int("max_q_len", max_q_len, minimum=0)
    max_kv_len = static_int("max_kv_len", max_kv_len, minimum=0)
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, array, VALUES)
        check_rank(name, array, 3, "[Tq, H, head_dim]" if name == "q" else "[Tk, H, head_dim]")
        check_static_last(name, array)
    total_q_len, num_heads, qk_head_dim = q.shape
    total_kv_len, _, _ = k.shape
    check_at_least_one("q", q.shape, 1, "H")
    if k.shape[1:] != q.shape[1:]:
        raise ValueError(
            f"k: got shape {show(k.shape)}; its heads and head_dim must equal q's, [Tk, {num_heads}, {qk_head_dim}]"
        )
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"v: got shape {show(v.shape)}; its tokens and heads must equal k's,"
            f" [{total_kv_len}, {num_heads}, head_dim]"
        )
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise ValueError(f"{name}: got dtype {array.dtype}; q, k and v must have one dtype, and q has {q.dtype}")
    check_rank("cu_seqlens_q", cu_seqlens_q, 1, "[B + 1]")
    check_at_least_one("cu_seqlens_q", cu_seqlens_q.shape, 0, "B + 1")
    batch = cu_seqlens_q.shape[0] - 1
    check_integers("cu_seqlens_q", cu_seqlens_q, (batch + 1,), "[B + 1]", "B from cu_seqlens_q")
    check_integers("cu_seqlens_kv", cu_seqlens_kv, (batch + 1,), "[B + 1]", "B from cu_seqlens_q")
    check_scale("softmax_scale", softmax_scale, optional=False)
    check_scale("q_scale", q_scale)
    check_scale("k_scale", k_scale)
    check_scale("v_scale", v_scale)
    return PrefillSpec(
        batch=batch,
        total_q_len=total_q_len,
        total_kv_len=total_kv_len,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        num_heads=num_heads,
        qk_head_dim=qk_head_dim,
        v_head_dim=v.shape[2],
        q_dtype=q.dtype,
        kv_dtype=k.dtype,
        causal=causal,
        return_lse=return_lse,
    )


def cache_write_spec(
    *,
    kv_cache: Array,
    latent: Array,
    k_rope: Array | None,
    slot_mapping: Array,
    kv_scale: Array | float | None = None,
) -> CacheWriteSpec:
    """The spec of write_kv_cache, or ValueError / TypeError naming the argument that is not legal."""
    num_pages, page_size, head_dim = cache_shape(kv_cache)
    check_dtype("latent", latent, FLOATS)
    check_rank("latent", latent, 2, "[T, L]")
    check_static_last("latent", latent)
    num_tokens, latent_dim = latent.shape
    if not 1 <= latent_dim <= head_dim:
        raise ValueError(
            f"latent: got shape {show(latent.shape)}; its width L must be between 1 and kv_cache's D = {head_dim}"
        )
    rope_dim = head_dim - latent_dim
    if k_rope is None:
        if rope_dim:
            raise ValueError(
                f"k_rope: got None; kv_cache's D = {head_dim} leaves {rope_dim} columns after latent's L = {latent_dim}"
            )
    else:
        check_rank("k_rope", k_rope, 2, "[T, R]")
        if k_rope.shape[0] != num_tokens or k_rope.shape[1] != rope_dim:
            raise ValueError(
                f"k_rope: got shape {show(k_rope.shape)}; legal: [T, R] = [{num_tokens}, {rope_dim}],"
                f" T from latent and R = kv_cache's D {head_dim} - L {latent_dim}"
            )
        if k_rope.dtype != latent.dtype:
            raise ValueError(f"k_rope: got dtype {k_rope.dtype}; it must be latent's, {latent.dtype}")
    check_integers("slot_mapping", slot_mapping, (num_tokens,), "[T]", "T from latent")
    check_scale("kv_scale", kv_scale)
    return CacheWriteSpec(
        num_tokens=num_tokens,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        num_pages=num_pages,
        page_size=page_size,
        in_dtype=latent.dtype,
        kv_dtype=kv_cache.dtype,
    )


def cache_gather_spec(
    *,
    kv_cache: Array,
    block_tables: Array,
    starts: Array,
    lens: Array,
    total_len: Dim,
    kv_scale: Array | float | None = None,
    out_dtype: str | None = None,
) -> CacheGatherSpec:
    """The spec of gather_kv_cache, or ValueError / TypeError naming the argument that is not legal.

    out_dtype None means the cache's dtype, bfloat16 for an fp8 cache."""
    num_pages, page_size, head_dim = cache_shape(kv_cache)
    batch, max_pages = table_shape(block_tables)
    check_integers("starts", starts, (batch,), "[B]", "B from block_tables")
    check_integers("lens", lens, (batch,), "[B]", "B from block_tables")
    total_len = static_dim("total_len", total_len)
    check_scale("kv_scale", kv_scale)
    if out_dtype is not None and out_dtype not in FLOATS:
        raise ValueError(f"out_dtype: got {out_dtype}; legal: {listed(FLOATS)}")
    return CacheGatherSpec(
        batch=batch,
        total_len=total_len,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=max_pages,
        kv_dtype=kv_cache.dtype,
        out_dtype=out_dtype or attention_out_dtype(kv_cache.dtype),
    )


def merge_spec(*, outs: Sequence[Array], lses: Sequence[Array]) -> MergeSpec:
    """The spec of merge_attention_states, or ValueError naming the argument that is not legal."""
    if not outs:
        raise ValueError("outs: got no partial result; at least one is needed")
    if len(lses) != len(outs):
        raise ValueError(f"lses: got {len(lses)} partial results; outs has {len(outs)}, and each needs its lse")
    first = outs[0]
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_dtype(f"outs[{i}]", out, FLOATS)
        if len(out.shape) < 1:
            raise ValueError(f"outs[{i}]: got shape {show(out.shape)}; legal: [..., H, L]")
        if out.shape != first.shape or out.dtype != first.dtype:
            raise ValueError(
                f"outs[{i}]: got {out.dtype}{show(out.shape)}; every part must be as outs[0],"
                f" {first.dtype}{show(first.shape)}"
            )
        check_dtype(f"lses[{i}]", lse, ("float32", "float64"))
        if lse.shape != out.shape[:-1]:
            raise ValueError(
                f"lses[{i}]: got shape {show(lse.shape)}; it must be outs[{i}]'s without the last axis,"
                f" {show(out.shape[:-1])}"
            )
        if lse.dtype != lses[0].dtype:
            raise ValueError(f"lses[{i}]: got dtype {lse.dtype}; every part must be as lses[0], {lses[0].dtype}")
    return MergeSpec(
        num_parts=len(outs),
        rows=first.shape[:-1],
        head_dim=first.shape[-1],
        out_dtype=first.dtype,
        lse_dtype=lses[0].dtype,
    )


def attention_out_dtype(dtype: str) -> str:
    """The dtype of a result computed from `dtype`: the same, bfloat16 for fp8."""
    return "bfloat16" if dtype == FP8 else dtype


def attention_lse_dtype(q_dtype: str) -> str:
    """The dtype of the scores' log-sum-exp: float32, float64 for a float64 query."""
    return "float64" if q_dtype == "float64" else "float32"


def _check_kv_dtype(q_dtype: str, kv_dtype: str) -> None:
    legal = [kv for kv in VALUES if kv == FP8 or (q_dtype != FP8 and (kv == q_dtype or q_dtype in SCALES))]
    if kv_dtype not in legal:
        raise ValueError(f"kv_cache: got dtype {kv_dtype}; with q of {q_dtype} legal: {listed(legal)}")
