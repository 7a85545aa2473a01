"""The arguments and results of the dense attention operations: mla_decode, mla_prefill and merge_attention_states.

Imports neither jax nor torch. Axes: B requests, S query tokens a request, T tokens over all requests, H query heads, L
latent width, R rope width, D = L + R, P pages, Z page size (tokens a page), M block-table width (pages a request at
most).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tsmla_kernels.contract.rules import (
    FLOATS,
    FP8,
    SCALES,
    VALUES,
    Array,
    Dim,
    Scale,
    attention_lse_dtype,
    attention_out_dtype,
    cache_shape,
    check_array,
    check_at_least_one,
    check_dtype,
    check_ints,
    check_rank,
    check_scales,
    check_size,
    check_static_last,
    least_latent_dim,
    listed,
    show,
    static_bool,
    static_int,
    table_shape,
)
from tsmla_kernels.contract.selection import SELECTION_WORDS, selection_words


class ResultDtypes:
    """The dtypes of an attention's results, which follow from its query's."""

    q_dtype: str

    @property
    def out_dtype(self) -> str:
        return attention_out_dtype(self.q_dtype)

    @property
    def lse_dtype(self) -> str:
        return attention_lse_dtype(self.q_dtype)


@dataclass(frozen=True)
class DecodeSpec(ResultDtypes):
    """One call of mla_decode. For ragged queries max_q_len is the static bound on a request's query tokens and
    total_q_len is T; for uniform ones max_q_len is S and total_q_len is B * S. visible_lens: whether the call says how
    many keys each token sees, in place of the causal rule. fp8_probabilities: whether kernels may round probabilities
    to float8_e4m3fn. merged: whether a row's pieces are merged; if not, the caller does it."""

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
    batch_invariant: bool
    visible_lens: bool = False
    fp8_probabilities: bool = False
    merged: bool = True

    @property
    def head_dim(self) -> int:
        """D, the width of a row of the cache."""
        return self.latent_dim + self.rope_dim

    def without_sizes(self) -> "DecodeSpec":
        """The spec with its sizes set to 0: it is the same for a call on a part of the requests or heads, and for one
        call in place of several."""
        max_q_len = self.max_q_len if self.ragged else 0
        return replace(self, batch=0, total_q_len=0, max_q_len=max_q_len, num_heads=0, num_pages=0, max_pages=0)

    def with_sizes_of(
        self, q: tuple[Dim, ...], kv_cache: tuple[Dim, ...], block_tables: tuple[Dim, ...]
    ) -> "DecodeSpec":
        """The spec with the same static facts, and with the sizes of arrays of these shapes."""
        batch, max_pages = block_tables
        total_q_len, max_q_len = (q[0], self.max_q_len) if self.ragged else (q[0] * q[1], q[1])
        return replace(
            self,
            batch=batch,
            total_q_len=total_q_len,
            max_q_len=max_q_len,
            num_heads=q[-2],
            num_pages=kv_cache[0],
            max_pages=max_pages,
        )


@dataclass(frozen=True)
class PrefillSpec(ResultDtypes):
    """One call of mla_prefill: total_q_len and total_kv_len are Tq and Tk, the packed lengths. deterministic: whether
    its gradients are. selection: whether the call selects keys by bits; sinks: whether it has sinks; max_logits:
    whether it returns the greatest logits."""

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
    deterministic: bool = False
    selection: bool = False
    sinks: bool = False
    max_logits: bool = False

    def without_sizes(self) -> "PrefillSpec":
        """The spec with its sizes set to 0: it is the same for a call on a part of the heads, and for one call in place
        of several."""
        return replace(self, batch=0, total_q_len=0, total_kv_len=0, num_heads=0)

    def with_sizes_of(self, q: tuple[Dim, ...], k: tuple[Dim, ...], cu_seqlens_q: tuple[Dim, ...]) -> "PrefillSpec":
        """The spec with the same static facts, and with the sizes of arrays of these shapes."""
        return replace(self, batch=cu_seqlens_q[0] - 1, total_q_len=q[0], total_kv_len=k[0], num_heads=q[1])


@dataclass(frozen=True)
class MergeSpec:
    """One call of merge_attention_states; rows is the shape [..., H] of each lse."""

    num_parts: int
    rows: tuple[Dim, ...]
    head_dim: Dim
    out_dtype: str
    lse_dtype: str

    @property
    def sum_dtype(self) -> str:
        """The dtype of the weights and sums."""
        return "float64" if "float64" in (self.out_dtype, self.lse_dtype) else "float32"


def decode_spec(
    *,
    q: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    softmax_scale: Scale,
    latent_dim: int = 512,
    cu_seqlens_q: Array | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    visible_lens: Array | None = None,
    q_scale: Scale = None,
    kv_scale: Scale = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    fp8_probabilities: bool = False,
) -> DecodeSpec:
    """The spec of mla_decode, or ValueError / TypeError naming the argument that is not legal."""
    latent_dim = static_int("latent_dim", latent_dim, minimum=1)
    causal = static_bool("causal", causal)
    static_bool("return_lse", return_lse)
    batch_invariant = static_bool("batch_invariant", batch_invariant)
    num_pages, page_size, head_dim = cache_shape(kv_cache)
    _check_latent_dim(latent_dim, head_dim)
    batch, max_pages = table_shape(block_tables)
    check_ints("seq_lens", seq_lens, "B", (batch, "B from block_tables"))

    ragged = cu_seqlens_q is not None
    check_dtype("q", q, VALUES)
    if cu_seqlens_q is not None:
        check_rank("q", q, "T H D", " (ragged, because cu_seqlens_q is given)")
        total_q_len, num_heads, q_dim = q.shape
        check_ints("cu_seqlens_q", cu_seqlens_q, "B + 1", (batch + 1, "B + 1, B from block_tables"))
        if max_q_len is None:
            raise ValueError("max_q_len: got None; ragged queries (cu_seqlens_q is given) need it as a static int")
        max_q_len = static_int("max_q_len", max_q_len, minimum=1)
    else:
        check_rank("q", q, "B S H D", ", or [T, H, D] with cu_seqlens_q")
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
    if visible_lens is not None:
        check_rank("visible_lens", visible_lens, "T" if ragged else "B S")
        if visible_lens.shape != q.shape[:-2]:
            raise ValueError(
                f"visible_lens: got shape {show(visible_lens.shape)}; it must be q's without the last two axes,"
                f" {show(q.shape[:-2])}"
            )
        check_dtype("visible_lens", visible_lens, ("int32",))
        if not causal:
            raise ValueError(
                "causal: got False with visible_lens, which says how many keys a token sees in place of that rule;"
                " legal: True"
            )
    _check_kv_dtype(q.dtype, kv_cache.dtype)
    if static_bool("fp8_probabilities", fp8_probabilities) and q.dtype != FP8:
        raise ValueError(f"fp8_probabilities: got True with q of {q.dtype}; legal: True with q of {FP8}, or False")
    check_scales(softmax_scale=softmax_scale, q_scale=q_scale, kv_scale=kv_scale)
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
        batch_invariant=batch_invariant,
        visible_lens=visible_lens is not None,
        fp8_probabilities=fp8_probabilities,
    )


def prefill_spec(
    *,
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Array | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    deterministic: bool = False,
    selection: Array | None = None,
    selection_rows: Array | None = None,
    sinks: Array | None = None,
    return_max_logits: bool = False,
) -> PrefillSpec:
    """The spec of mla_prefill, or ValueError / TypeError naming the argument that is not legal."""
    causal = static_bool("causal", causal)
    static_bool("return_lse", return_lse)
    return_max_logits = static_bool("return_max_logits", return_max_logits)
    deterministic = static_bool("deterministic", deterministic)
    max_q_len = static_int("max_q_len", max_q_len, minimum=0)
    self_attention = cu_seqlens_kv is None
    cu_seqlens_kv, max_kv_len = keys_or_queries(cu_seqlens_q, max_q_len, cu_seqlens_kv, max_kv_len)
    max_kv_len = static_int("max_kv_len", max_kv_len, minimum=0)
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, array, VALUES)
        check_rank(name, array, "Tq H head_dim" if name == "q" else "Tk H head_dim")
        check_static_last(name, array)
    if self_attention:
        check_self_attention("k", k, q)
    total_q_len, num_heads, qk_head_dim = q.shape
    check_at_least_one("q", q.shape, 1, "H")
    if k.shape[1:] != q.shape[1:]:
        raise ValueError(
            f"k: got shape {show(k.shape)}; its heads and head_dim must equal q's, [Tk, {num_heads}, {qk_head_dim}]"
        )
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"v: got shape {show(v.shape)}; its tokens and heads must equal k's, [{k.shape[0]}, {num_heads}, head_dim]"
        )
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise ValueError(f"{name}: got dtype {array.dtype}; q, k and v must have one dtype, and q has {q.dtype}")
    check_ints("cu_seqlens_q", cu_seqlens_q, "B + 1")
    check_at_least_one("cu_seqlens_q", cu_seqlens_q.shape, 0, "B + 1")
    batch = cu_seqlens_q.shape[0] - 1
    check_ints("cu_seqlens_kv", cu_seqlens_kv, "B + 1", (batch + 1, "B + 1, B from cu_seqlens_q"))
    check_scales(softmax_scale=softmax_scale, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    _check_selection(selection, selection_rows, total_q_len, max_kv_len)
    if sinks is not None:
        check_array("sinks", sinks, "H", FLOATS, (num_heads, "H, q's heads"))
    return PrefillSpec(
        batch=batch,
        total_q_len=total_q_len,
        total_kv_len=k.shape[0],
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        num_heads=num_heads,
        qk_head_dim=qk_head_dim,
        v_head_dim=v.shape[2],
        q_dtype=q.dtype,
        kv_dtype=k.dtype,
        causal=causal,
        deterministic=deterministic,
        selection=selection is not None,
        sinks=sinks is not None,
        max_logits=return_max_logits,
    )


def _check_selection(selection: Array | None, selection_rows: Array | None, total_q_len: Dim, max_kv_len: int) -> None:
    """ValueError unless both are None, or selection has words of bits for max_kv_len keys and selection_rows, if given,
    has a row index for each query token."""
    if selection is None:
        if selection_rows is not None:
            raise ValueError("selection_rows: got an array without selection, whose rows it numbers; legal: None")
        return
    check_ints("selection", selection, "R W")
    rows, words = selection.shape
    least = selection_words(max_kv_len)
    if not isinstance(words, int) or words % SELECTION_WORDS or words < least:
        raise ValueError(
            f"selection: got shape {show(selection.shape)}; its W must be a multiple of {SELECTION_WORDS}, at least"
            f" {least}: a bit for each of max_kv_len = {max_kv_len} keys"
        )
    if selection_rows is None:
        check_size("selection", selection, 0, total_q_len, "Tq from q, as selection_rows is None")
        return
    check_ints("selection_rows", selection_rows, "Tq", (total_q_len, "Tq from q"))
    check_at_least_one("selection", (rows,), 0, "R")


def keys_or_queries(cu_seqlens_q: Any, max_q_len: int, cu_seqlens_kv: Any, max_kv_len: int | None) -> tuple[Any, int]:
    """The keys' offsets and bound, or the queries' if the call gives none, as in self-attention. TypeError if the keys'
    offsets are given without the bound, ValueError if the bound is given without the offsets."""
    if cu_seqlens_kv is not None and max_kv_len is None:
        raise TypeError("max_kv_len: got None; legal: a static int >= 0 where cu_seqlens_kv is given")
    if cu_seqlens_kv is None and max_kv_len is not None:
        raise ValueError(
            f"max_kv_len: got {max_kv_len} without cu_seqlens_kv; legal: None, as max_q_len bounds the keys"
        )
    return (cu_seqlens_q, max_q_len) if max_kv_len is None else (cu_seqlens_kv, max_kv_len)


def check_self_attention(name: str, keys: Any, q: Any) -> None:
    """ValueError unless keys [Tk, ...] are as many as queries [Tq, ...]; for calls that give the keys no offsets."""
    if keys.shape[0] != q.shape[0]:
        raise ValueError(
            f"{name}: got shape {show(tuple(keys.shape))}; without cu_seqlens_kv its Tk must be q's Tq = {q.shape[0]}"
        )


def prefill_kv_spec(
    *,
    q: Array,
    kv: Array,
    k_rope: Array,
    cu_seqlens_q: Array,
    max_q_len: int,
    softmax_scale: Scale,
    cu_seqlens_kv: Array | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    return_lse: bool = False,
    deterministic: bool = False,
    selection: Array | None = None,
    selection_rows: Array | None = None,
    sinks: Array | None = None,
    return_max_logits: bool = False,
) -> PrefillSpec:
    """The spec of mla_prefill_kv, which is that of mla_prefill on the k and v that kv and k_rope stand for, or
    ValueError / TypeError naming the argument that is not legal."""
    for name, array, rank, legal in (
        ("q", q, 3, "[Tq, H, K]"),
        ("kv", kv, 3, "[Tk, H, K - R + V]"),
        ("k_rope", k_rope, 2, "[Tk, R]"),
    ):
        if len(array.shape) != rank:
            raise ValueError(f"{name}: got shape {show(array.shape)}; legal: {legal}")
    (_, heads, k_dim), (rows, kv_heads, width), (rope_rows, rope_dim) = q.shape, kv.shape, k_rope.shape
    if cu_seqlens_kv is None:
        check_self_attention("kv", kv, q)
    if rope_rows != rows:
        raise ValueError(f"k_rope: got shape {show(k_rope.shape)}; its Tk must equal kv's, {rows}")
    if not 0 <= rope_dim < k_dim:
        raise ValueError(f"k_rope: got shape {show(k_rope.shape)}; its R must be between 0 and q's K - 1 = {k_dim - 1}")
    if width <= k_dim - rope_dim:
        raise ValueError(
            f"kv: got shape {show(kv.shape)}; its last axis must be wider than K - R = {k_dim - rope_dim},"
            " the columns of the keys"
        )
    if kv_heads != heads:
        raise ValueError(f"kv: got shape {show(kv.shape)}; its H must equal q's, {heads}")
    for name, array in (("kv", kv), ("k_rope", k_rope)):
        if array.dtype != q.dtype:
            raise ValueError(
                f"{name}: got dtype {array.dtype}; q, kv and k_rope must have one dtype, and q has {q.dtype}"
            )
    return prefill_spec(
        q=q,
        k=Array((rows, heads, k_dim), kv.dtype),
        v=Array((rows, heads, width - (k_dim - rope_dim)), kv.dtype),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        softmax_scale=softmax_scale,
        causal=causal,
        return_lse=return_lse,
        deterministic=deterministic,
        selection=selection,
        selection_rows=selection_rows,
        sinks=sinks,
        return_max_logits=return_max_logits,
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


def _check_latent_dim(latent_dim: int, head_dim: int) -> None:
    if latent_dim > head_dim:
        raise ValueError(f"latent_dim: got {latent_dim}; it must be at most kv_cache's last axis D = {head_dim}")
    if latent_dim < (least := least_latent_dim(head_dim)):
        raise ValueError(
            f"latent_dim: got {latent_dim}; legal: {least} to {head_dim}, as no model has more rope columns than latent"
            f" ones in kv_cache's D = {head_dim}"
        )


def _check_kv_dtype(q_dtype: str, kv_dtype: str) -> None:
    legal = [kv for kv in VALUES if kv == FP8 or (q_dtype != FP8 and (kv == q_dtype or q_dtype in SCALES))]
    if kv_dtype not in legal:
        raise ValueError(f"kv_cache: got dtype {kv_dtype}; with q of {q_dtype} legal: {listed(legal)}")
