"""How TokenSpeed's Blackwell kernels serve a call: static configurations, query tiles, splits and workspaces.

The decisions are those of tokenspeed-mla 2.0. The docstrings here name the package's functions, and
tests/kernels/sm100 compares their results with those of the functions here. The decisions are made from static shapes,
without importing that package, cutlass or torch. A call that the package can't run gets the reason here.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tsmla_kernels.contract import DecodeSpec, Dim, PrefillSpec

ARCHS = ("sm_100a", "sm_103a", "sm_107a")

NOTICE = (
    "TokenSpeed's kernels, compiled for SM100, SM103 and SM107 and checked without a GPU of that kind; not run on one"
    " by us"
)

FINITE = "unused slots in the last page of a request must hold finite numbers"  # they are multiplied by 0

LATENT_DIM, ROPE_DIM = 512, 64
KEY_TILE = 128  # keys of one step of a CTA pair
PAGE_SIZES = (16, 32, 64, 128)
MAX_HEADS = 128  # rows of the largest query tile, into which the heads of one token must fit
MAX_Q_LEN = 256  # the kernels' code has one step for each query token
MAX_ELEMENTS = 1 << 31  # a result must have fewer, because the kernels index it in 32 bits
LEAST_WORKSPACE = 16  # bytes: the operand exists even if no request is split

QK_HEAD_DIM, V_HEAD_DIM = 192, 128
PREFILL_ROWS = 256  # query rows of one CTA

COMPILER_OPTIONS = "--opt-level 2"  # the package's own; at the DSL's default, 3, most of its kernels spill

_CAPABILITIES = {"sm_100a": (10, 0), "sm_103a": (10, 3), "sm_107a": (10, 7)}
_FP8 = "float8_e4m3fn"


def capability(arch: str) -> tuple[int, int]:
    """The compute capability, as the package takes it. ValueError for an architecture that is not in ARCHS."""
    if arch not in _CAPABILITIES:
        raise ValueError(f"arch: got {arch!r}; TokenSpeed's kernels are written for {', '.join(ARCHS)}")
    return _CAPABILITIES[arch]


# ---- decode


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """The static facts that a decode object is compiled for. All else is dynamic.

    Attributes:
      dtype: the dtype of q and cache, "float8_e4m3fn", "bfloat16" or "float16". If it is fp8, out is bfloat16.
      num_heads: H. max_q_len: S or, if ragged, the bound on a request's queries.
      page_size: Z, or 64 if Z is 128 and dtype is fp8.
      traced_scales: whether the kernel's loops read the scales from device memory. If not, the launch passes them by
        value. The object serves every value in both cases.
    """

    dtype: str
    num_heads: int
    max_q_len: int
    page_size: int = 64
    traced_scales: bool = False

    @property
    def fp8(self) -> bool:
        return self.dtype == _FP8


@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """How the S * H query rows of a request lie in the tiles of the matrix unit: row r of the request is query token
    r // H, head r % H, and tile t begins with row t * stride.

    Attributes:
      rows: M of a tile. count: tiles of one request.
      stride: query rows in a tile; the rest of the tile is padding.
      fold: how many whole query tokens a tile has (the package's fold_sq_factor); 1 if packed.
      packed: whether a tile can hold a part of a query token's heads (the package's pack_q).
    """

    rows: int
    count: int
    stride: int
    fold: int
    packed: bool


def decode_reasons(spec: DecodeSpec) -> list[str]:
    """Why TokenSpeed's decode kernels cannot run this call; empty if they can."""
    reasons = []
    if spec.q_dtype not in (_FP8, "bfloat16", "float16"):
        reasons.append(f"q.dtype is {spec.q_dtype}; TokenSpeed's decode takes {_FP8}, bfloat16 or float16")
    elif spec.kv_dtype != spec.q_dtype:
        reasons.append(f"kv_cache.dtype is {spec.kv_dtype}; TokenSpeed's decode takes q's dtype, {spec.q_dtype}")
    if spec.page_size not in PAGE_SIZES:
        why = " (rows of single-token pages are no legal TMA box)" if spec.page_size == 1 else ""
        legal = ", ".join(map(str, PAGE_SIZES[:-1]))
        reasons.append(f"page size is {spec.page_size}{why}; TokenSpeed's decode takes {legal} or {PAGE_SIZES[-1]}")
    if spec.latent_dim != LATENT_DIM:
        reasons.append(f"latent_dim is {spec.latent_dim}; TokenSpeed's decode takes {LATENT_DIM}")
    if spec.rope_dim != ROPE_DIM:
        reasons.append(f"the rope width is {spec.rope_dim}; TokenSpeed's decode takes {ROPE_DIM}")
    if isinstance(spec.num_heads, int) and spec.num_heads > MAX_HEADS:
        reasons.append(f"num_heads (H) is {spec.num_heads}; TokenSpeed's decode takes at most {MAX_HEADS}")
    if isinstance(spec.max_q_len, int) and spec.max_q_len > MAX_Q_LEN:
        name = "max_q_len" if spec.ragged else "S"
        reasons.append(f"{name} is {spec.max_q_len}; TokenSpeed's decode takes at most {MAX_Q_LEN}")
    if isinstance(spec.num_heads, int) and isinstance(spec.max_q_len, int):
        reasons += _too_large("B", spec.batch, spec.max_q_len * spec.num_heads * LATENT_DIM)
    return reasons


def decode_config(spec: DecodeSpec, *, traced_scales: bool = False) -> DecodeConfig:
    """The configuration that serves `spec`."""
    return DecodeConfig(
        dtype=spec.q_dtype,
        num_heads=spec.num_heads,
        max_q_len=spec.max_q_len,
        # With pages of 128 the package's fp8 kernels don't compile for the small tile, and spill for the large one. A
        # page of 128 is passed as two consecutive pages of 64.
        page_size=64 if spec.q_dtype == _FP8 and spec.page_size == 128 else spec.page_size,
        traced_scales=traced_scales,
    )


def query_tiles(config: DecodeConfig, arch: str) -> QueryTiles:
    """The package's choice of tile, fold and packing (select_mla_decode_tilers, get_mla_decode_fold_sq_factor and
    tokenspeed_mla_decode itself)."""
    heads, tokens = config.num_heads, config.max_q_len
    rows = 64 if config.fp8 and arch == "sm_100a" and heads * tokens <= 64 else 128
    max_fold = min(tokens, rows // heads)
    fold = next((fold for fold in range(max_fold, 1, -1) if tokens % fold == 0), 1)
    packed_count = -(-heads * tokens // rows)
    if rows == 128 and packed_count < tokens // fold:
        return QueryTiles(rows, packed_count, rows, fold=1, packed=True)
    return QueryTiles(rows, tokens // fold, heads * fold, fold, packed=False)


def reducer_splits(config: DecodeConfig, arch: str) -> int:
    """The most splits that the merging kernel takes: the largest split_count, so that one object serves every batch.
    (The package compiles one object for each power of two.)"""
    return 64 if query_tiles(config, arch).rows == 64 else 32


def split_count(
    config: DecodeConfig,
    arch: str,
    batch: Dim,
    num_sms: int,
    max_keys: Dim,
    *,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> Dim:
    """How many pieces each request's keys are cut into (_get_split_kv_and_workspace_size). max_keys is how many keys
    the pages of one row of the block table hold. If sizes are symbolic, pass jax's `minimum` and `maximum`."""
    tiles = query_tiles(config, arch)
    ctas = 1 if tiles.rows == 64 else 2
    split = maximum(1, num_sms // batch // (tiles.count * ctas))
    if not config.fp8:
        return minimum(split, 32)
    key_tiles = _ceil_div(max_keys, KEY_TILE)
    if tiles.rows == 64:
        split = minimum(key_tiles, split)
        split = minimum(_ceil_div(key_tiles, _ceil_div(key_tiles, split)), 64)
    else:
        split = minimum(split, 32)
    return _ceil_div(key_tiles, _ceil_div(key_tiles, split))


def workspace_shape(
    config: DecodeConfig,
    arch: str,
    batch: Dim,
    splits: Dim,
    *,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> tuple[Dim, Dim]:
    """The int8 workspace [splits, bytes a split], from whose shape the launcher reads the number of splits. Its size is
    the package's get_workspace_size or LEAST_WORKSPACE if that is 0, as it is for a single split."""
    tiles = query_tiles(config, arch)
    size = batch * tiles.stride * tiles.count * (LATENT_DIM + 1) * 4
    return splits, maximum(LEAST_WORKSPACE, size * (minimum(splits, 2) - 1))


def decode_outputs(
    spec: DecodeSpec,
    config: DecodeConfig,
    arch: str,
    num_sms: int,
    *,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> tuple[tuple[Dim, ...], ...]:
    """The shapes of out, lse and the workspace of a call. A batch-invariant call does not cut requests into pieces."""
    bounds = {"minimum": minimum, "maximum": maximum}
    num_keys = spec.max_pages * spec.page_size
    splits = 1 if spec.batch_invariant else split_count(config, arch, spec.batch, num_sms, num_keys, **bounds)
    rows = (spec.batch, config.max_q_len, config.num_heads)
    return (*rows, LATENT_DIM), rows, workspace_shape(config, arch, spec.batch, splits, **bounds)


# ---- prefill


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """The static facts that a prefill object is compiled for. All else is dynamic, including the number of heads.

    Attributes:
      dtype: the dtype of q, k and v, "float8_e4m3fn" or "bfloat16"; out is bfloat16.
      causal: whether query i of a request sees only keys j <= i + m - n, if the request has n queries and m keys.
      traced_scales: as in DecodeConfig.
    """

    dtype: str
    causal: bool
    traced_scales: bool = False


def prefill_reasons(spec: PrefillSpec) -> list[str]:
    """Why TokenSpeed's prefill kernel cannot run this call; empty if it can."""
    reasons = []
    if spec.q_dtype not in (_FP8, "bfloat16"):
        reasons.append(f"q.dtype is {spec.q_dtype}; TokenSpeed's prefill takes {_FP8} or bfloat16")
    if (spec.qk_head_dim, spec.v_head_dim) != (QK_HEAD_DIM, V_HEAD_DIM):
        reasons.append(
            f"the head dims are {spec.qk_head_dim} and {spec.v_head_dim}; TokenSpeed's prefill takes {QK_HEAD_DIM} and"
            f" {V_HEAD_DIM}"
        )
    if isinstance(spec.num_heads, int):
        reasons += _too_large("Tq", spec.total_q_len, spec.num_heads * V_HEAD_DIM)
    if spec.selection:
        reasons.append("the call has a selection; TokenSpeed's prefill takes none")
    if spec.sinks:
        reasons.append("the call has sinks; TokenSpeed's prefill takes none")
    if spec.max_logits:
        reasons.append("return_max_logits is True; TokenSpeed's prefill returns none")
    return reasons


def prefill_config(spec: PrefillSpec, *, traced_scales: bool = False) -> PrefillConfig:
    """The configuration that serves `spec`."""
    return PrefillConfig(dtype=spec.q_dtype, causal=spec.causal, traced_scales=traced_scales)


def check_finite(bad: Sequence[bool]) -> None:
    """ValueError if a request is bad: it leaves a slot of its last page unused that is not finite."""
    for request, is_bad in enumerate(bad):
        if is_bad:
            raise ValueError(
                f"kv_cache: request {request} leaves a slot of its last page unused that is not finite; legal on"
                f" Blackwell: {FINITE}"
            )


# ---- scales by value

SCALE_OPERANDS = ("logit_scale_high", "logit_scale_low", "out_scale_high", "out_scale_low")


def scale_sizes(logit_scale: float, out_scale: float) -> tuple[int, ...]:
    """The sizes of the SCALE_OPERANDS, which encode two float32 values: an array's size is the only number that XLA's
    custom call passes to a host function."""
    bits = struct.unpack("<2I", struct.pack("<2f", logit_scale, out_scale))
    return tuple(half + 1 for word in bits for half in (word >> 16, word & 0xFFFF))


def _too_large(name: str, size: Dim, elements: int) -> list[str]:
    """The reason, if any, against `size` rows of `elements` elements: they have, or may have, MAX_ELEMENTS or more."""
    largest = (MAX_ELEMENTS - 1) // elements
    try:
        if size <= largest:
            return []
    except Exception:  # jax's error for a comparison of symbolic sizes that it can't decide
        return [
            f"{name} is {size}, which may be too large: TokenSpeed's kernels index 2^31 elements, {name} <= {largest};"
            f' a bound says so, jax.export.symbolic_shape("{size}", constraints=["{size} <= {min(largest, 4096)}"])'
        ]
    return [f"{name} is {size}; TokenSpeed's kernels index 2^31 elements, {name} <= {largest} here"]


def _ceil_div(a: Dim, b: Dim) -> Dim:
    return -(-a // b)
