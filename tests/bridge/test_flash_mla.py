"""The drop-in for package flash_mla: its signatures, layouts, base of lse and rows without keys."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import tsmla_bridge
from tests.bridge.inputs import BF16, Inputs, assert_close, inputs
from tests.gpu.small_grid import numbers
from tests.oracles import sparse_inputs
from tsmla_bridge.engines import flash_mla
from tsmla_bridge.engines.flash_mla import joining, selected, warming
from tsmla_bridge.ops import mla_decode

HEADS, SCALE = 4, 192**-0.5

# flash_mla 1.0.0 and sgl-flash-mla 1.0.0: names, and defaults where there are some.
SIGNATURES: dict[str, dict[str, Any]] = {
    "get_mla_metadata": {"args": ..., "kwargs": ...},
    "flash_mla_with_kvcache": {
        "q": ..., "k_cache": ..., "block_table": ..., "cache_seqlens": ..., "head_dim_v": ...,
        "tile_scheduler_metadata": ..., "num_splits": None, "softmax_scale": None, "causal": False,
        "is_fp8_kvcache": None, "indices": None, "attn_sink": None, "extra_k_cache": None,
        "extra_indices_in_kvcache": None, "topk_length": None, "extra_topk_length": None,
        "enable_batch_invariant": False, "use_legacy": False, "kv_format": None, "descale_q": None, "descale_k": None,
    },
    "get_mla_decoding_metadata": {
        "seqlens_k": ..., "num_q_tokens_per_head_k": ..., "h_k": ..., "h_q": None, "is_fp8_kvcache": False,
        "topk": None, "use_legacy": False,
    },
    "flash_mla_sparse_fwd": {
        "q": ..., "kv": ..., "indices": ..., "sm_scale": ..., "d_v": 512, "attn_sink": None, "topk_length": None,
        "indexer_topk": 0, "use_legacy": False, "return_log2_lse": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(flash_mla, name)).parameters.values()
    empty = inspect.Parameter.empty
    assert {p.name: ... if p.default is empty else p.default for p in parameters} == SIGNATURES[name]


SPARSE = {
    "k_cache": torch.zeros(2, 64, 1, 656, dtype=torch.uint8), "indices": torch.zeros(2, 1, 64, dtype=torch.int32),
    "is_fp8_kvcache": True,
}  # fmt: skip


def case(lens: list[int], **shape: Any) -> Inputs:
    return inputs(lens, **({"latent_dim": 512, "rope_dim": 64, "heads": HEADS, "page_size": 64} | shape))


def attend(given: Inputs, device: str, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As an engine calls the package: metadata first, then the layers."""
    q, cache, tables, lens = (x.to(device) for x in given.arrays)
    metadata, num_splits = flash_mla.get_mla_metadata(lens, q.shape[1] * HEADS, 1)
    return flash_mla.flash_mla_with_kvcache(
        q, cache.unsqueeze(2), tables, lens, 512, metadata, num_splits, **({"softmax_scale": SCALE} | changed)
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dense_decode(device: str, q_len: int, causal: bool, dtype: str) -> None:
    given = case([70, 129, 0, 2, 64], s=q_len, q_dtype=dtype, kv_dtype=dtype)
    out, lse = attend(given, device, causal=causal)
    want, want_lse = given.want(scale=SCALE, causal=causal)
    assert out.dtype == given.q.dtype and lse.dtype == torch.float32 and lse.shape == (5, HEADS, q_len)
    assert_close(out.cpu(), want, BF16)
    # The package's logarithm is natural, and +inf where no key is seen.
    assert_close(lse.cpu(), np.where(np.isneginf(want_lse), np.inf, want_lse).swapaxes(1, 2), 1e-3)
    assert out[2].eq(0).all() and lse[2].eq(torch.inf).all()
    assert_laid_out(out, lse)


def assert_laid_out(out: torch.Tensor, lse: torch.Tensor) -> None:
    """As the package's results are in memory: out dense, and lse [B, H, S] a view of [B, S, H]."""
    assert out.is_contiguous() and lse.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [slice(None), slice(2, None), slice(1, 2)])
def test_a_table_is_read_past_its_columns(device: str, rows: slice) -> None:
    """As FlashMLA does: SGLang captures its graphs with the first columns of a buffer, whose rows it fills later."""
    dtype = "float32" if device == "cpu" else "bfloat16"  # the kernel takes no float32
    given = case([70, 3, 129], q_dtype=dtype, kv_dtype=dtype)
    q, cache, tables, lens = (x.to(device) for x in given.arrays)
    buffer = torch.full((5, 40), -1, dtype=torch.int32, device=device)
    buffer[1:4, : tables.shape[1]] = tables
    out, lse = flash_mla.flash_mla_with_kvcache(
        q[rows], cache[:, :, None], buffer[1:4, :1][rows], lens[rows], 512, None, None, SCALE, True
    )
    want, want_lse = given.want(scale=SCALE)
    assert_close(out.cpu(), want[rows], BF16)
    assert_close(lse.cpu(), want_lse[rows].swapaxes(1, 2), 1e-3)


def test_a_table_at_the_end_of_its_memory_is_read_as_far_as_that() -> None:
    given = case([70, 3, 129])
    q, cache, tables, lens = given.arrays
    memory = torch.full((4 + 2 * 40 + tables.shape[1],), -1, dtype=torch.int32)
    table = memory.as_strided(tables.shape, (40, 1), 4)
    table.copy_(tables)
    out, _ = flash_mla.flash_mla_with_kvcache(q, cache[:, :, None], table[:, :1], lens, 512, None, None, SCALE, True)
    assert_close(out, given.want(scale=SCALE)[0], BF16)


def test_an_fp8_cache() -> None:
    given = case([70, 5], q_dtype="bfloat16", kv_dtype="float8_e4m3fn")
    out, _ = attend(given, "cpu", is_fp8_kvcache=True, causal=True)
    assert_close(out, given.want(scale=SCALE)[0], BF16)


def test_sparse_decode_of_no_request() -> None:
    q, pages = torch.zeros(0, 1, 4, 576).bfloat16(), torch.zeros(4, 64, 1, 656, dtype=torch.uint8)
    indices, (schedule, splits) = torch.zeros(0, 1, 8, dtype=torch.int32), flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, pages, None, None, 512, schedule, splits, 0.1, False, True, indices=indices
    )
    assert out.shape == (0, 1, 4, 512) and lse.shape == (0, 4, 1)


def test_the_default_scale() -> None:
    given = case([70], q_dtype="bfloat16", kv_dtype="bfloat16")
    out, _ = attend(given, "cpu", softmax_scale=None)
    assert_close(out, given.want(scale=576**-0.5)[0], BF16)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
def test_sparse_decode(device: str, sinks: bool, lengths: bool) -> None:
    """Each query token over the slots that are selected for it."""
    given = sparse_inputs.call(layout="v32", sinks=sinks, lengths=lengths)
    arrays = {name: numbers(array).to(device) for name, array in given.arrays.items()}
    tokens = len(arrays["q"])
    cache = arrays["kv_cache"].unsqueeze(2)
    out, lse = flash_mla.flash_mla_with_kvcache(
        arrays["q"][:, None], cache, None, None, 512, *flash_mla.get_mla_metadata(),
        softmax_scale=given.options["softmax_scale"], is_fp8_kvcache=True, indices=arrays["indices"][:, None],
        topk_length=arrays.get("lengths"), attn_sink=arrays.get("sinks"),
    )  # fmt: skip
    want, want_lse = given.want()
    assert out.shape == (tokens, 1, *want.shape[1:]) and lse.shape == (tokens, want.shape[1], 1)
    assert_laid_out(out, lse)
    assert_close(out[:, 0].cpu(), want, BF16)
    assert_close(lse[..., 0].cpu(), np.where(np.isneginf(want_lse), np.inf, want_lse), 1e-3)


def as_package_pages(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """V4 pages [P, bytes] as the package has them: [P, Z, 1, 584], each page padded."""
    return pages.as_strided((len(pages), page_size, 1, 584), (pages.stride(0), 584, 584, 1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("lengths", [(False, False), (True, False), (False, True), (True, True)])
def test_sparse_decode_over_v4_pages(device: str, window: int | None, lengths: tuple[bool, bool]) -> None:
    """One cache, or two with pages of different sizes, and each with lengths of its own or without."""
    given = sparse_inputs.call(layout="v4", window=window, selected=11, lengths=False, sinks=True)
    cut = window or 11
    rng = np.random.default_rng(2)
    counts = [rng.integers(0, most + 1, 8).astype(np.int32) for most in (cut, 11 - cut)]
    for count, part, has in zip(counts, (slice(cut), slice(cut, None)), lengths, strict=True):
        if has:
            columns = given.arrays["indices"][:, part]
            # What lies behind a length may hold anything.
            columns[np.arange(columns.shape[1]) >= count[:, None]] = -1
    want, want_lse = given.want()
    arrays = {name: numbers(array).to(device) for name, array in given.arrays.items()}
    slots = arrays["indices"][:, None].contiguous()
    near, far = (x.contiguous() for x in slots.split([cut, 11 - cut], dim=2))
    for count, columns, has in zip(counts, (near, far), lengths, strict=True):
        if has:
            behind = torch.arange(columns.shape[2], device=device) >= torch.tensor(count, device=device)[:, None, None]
            columns[behind] = sparse_inputs.POISON
    counted = [torch.tensor(count, device=device) if has else None for count, has in zip(counts, lengths, strict=True)]
    options = {"topk_length": counted[0]}
    if window:
        options |= {
            "extra_k_cache": as_package_pages(arrays["compressed_kv_cache"], 6),
            "extra_indices_in_kvcache": far, "extra_topk_length": counted[1],
        }  # fmt: skip
    out, lse = flash_mla.flash_mla_with_kvcache(
        arrays["q"][:, None], as_package_pages(arrays["kv_cache"], 8), None, None, 512, *flash_mla.get_mla_metadata(),
        softmax_scale=given.options["softmax_scale"], is_fp8_kvcache=True, indices=near, attn_sink=arrays["sinks"],
        **options,
    )  # fmt: skip
    assert_close(out[:, 0].cpu(), want, BF16)
    assert_close(lse[..., 0].cpu(), np.where(np.isneginf(want_lse), np.inf, want_lse), 1e-3)


def test_queries_that_are_columns_of_wider_ones(gpu: Any) -> None:
    q = torch.randn(2, 1, 64, 640).bfloat16()[..., :576]
    indices, schedule = torch.zeros(2, 1, 64, dtype=torch.int32), flash_mla.get_mla_metadata()
    cache, rows = torch.zeros(1, 64, 1, 656, dtype=torch.uint8), torch.randn(64, 1, 576).bfloat16()
    found = [
        (
            *flash_mla.flash_mla_with_kvcache(queries, cache, None, None, 512, *schedule, indices=indices),
            *flash_mla.flash_mla_sparse_fwd(queries[:, 0], rows, indices, 0.1)[::2],
        )
        for queries in (q, q.contiguous())
    ]
    assert len(gpu.launches) == 4 and all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("lengths", [False, True])
def test_sparse_prefill(device: str, width: int, lengths: bool) -> None:
    """Rows in order in place of a cache, and numbers past the last row for none."""
    given = sparse_inputs.call(
        layout="plain", width=width, kv_dtype="bfloat16", pages=40, page_size=1, sinks=True, lengths=lengths
    )
    want, want_lse = given.want()
    arrays = {name: numbers(array).to(device) for name, array in given.arrays.items()}
    indices = arrays["indices"][:, None].clone()
    indices[:, :, ::2] = torch.where(indices[:, :, ::2] == -1, 40, indices[:, :, ::2])
    # The package's rows have no scale.
    scale = given.options["kv_scale"]
    out, most, lse = flash_mla.flash_mla_sparse_fwd(
        arrays["q"], arrays["kv_cache"], indices, given.options["softmax_scale"] * scale, 512, arrays["sinks"],
        arrays.get("lengths"),
    )  # fmt: skip
    assert most is None and out.dtype == arrays["q"].dtype
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    assert_close(out.cpu() * scale, want, BF16)
    assert_close(lse.cpu(), np.where(np.isneginf(want_lse), np.inf, want_lse), 1e-3)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        (
            {"indices": torch.zeros(2, 1, 64, dtype=torch.int32), "is_fp8_kvcache": True},
            ValueError,
            r"k_cache: got torch.bfloat16 of shape \[.*\]; with indices legal: \[P, Z, 1, 656\]",
        ),
        ({"extra_k_cache": torch.zeros(1)}, ValueError, "extra_k_cache: got tensors; they go only with indices"),
        (
            {"indices": torch.zeros(2, 1, 64, dtype=torch.int32), "is_fp8_kvcache": False},
            ValueError,
            "causal, is_fp8_kvcache: got False, False",
        ),
        ({"attn_sink": torch.zeros(HEADS)}, ValueError, "attn_sink: got tensors; they go only with indices"),
        ({"is_fp8_kvcache": True}, ValueError, "is_fp8_kvcache: got True for a cache of torch.bfloat16"),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        attend(case([70, 5], q_dtype="bfloat16", kv_dtype="bfloat16"), "cpu", **changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"head_dim_v": 600}, "^head_dim_v: got 600; it must be at most k_cache's last axis D = 576"),
        ({"head_dim_v": 64}, "^head_dim_v: got 64; legal: 288 to 576"),
        ({"head_dim_v": None}, "^head_dim_v: got NoneType; legal: a static int"),
        ({"softmax_scale": "x"}, "^softmax_scale: got str; legal: a float or a float32 scalar array"),
        ({"softmax_scale": 0.0}, "^softmax_scale: got 0.0; legal: a positive number"),
        ({"q": [1]}, r"^q: got list; legal: a torch\.Tensor"),
        ({"k_cache": 1}, r"^k_cache: got int; legal: a torch\.Tensor"),
        ({"block_table": [1]}, r"^block_table: got list; legal: a torch\.Tensor"),
        ({"cache_seqlens": torch.ones(2).long()}, "^cache_seqlens: got dtype int64; legal: int32"),
        ({"cache_seqlens": torch.ones(1).int()}, r"^cache_seqlens: got shape \[1\]; axis 0 must be 2"),
        ({"k_cache": torch.ones(2, 64, 1, 576)}, "^k_cache: got dtype float32; with q of bfloat16 legal: bfloat16"),
        ({**SPARSE, "indices": 1}, r"^indices: got int; legal: a torch\.Tensor"),
        ({**SPARSE, "topk_length": 3}, r"^topk_length: got int; legal: a torch\.Tensor"),
        ({**SPARSE, "topk_length": torch.ones(2).long()}, "^topk_length: got dtype int64; legal: int32"),
        ({**SPARSE, "attn_sink": torch.ones(3)}, r"^attn_sink: got shape \[3\]; axis 0 must be 4 \(H, q's heads\)"),
        ({**SPARSE, "head_dim_v": 600}, "^head_dim_v: got 600; it must be at most q's last axis D = 576"),
    ],
)
def test_errors_name_the_packages_arguments(changed: dict[str, Any], said: str) -> None:
    given = case([70, 5], q_dtype="bfloat16", kv_dtype="bfloat16")
    legal = {
        "q": given.q, "k_cache": given.kv_cache.unsqueeze(2), "block_table": given.block_tables,
        "cache_seqlens": given.seq_lens, "head_dim_v": 512, "tile_scheduler_metadata": None,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=said):
        flash_mla.flash_mla_with_kvcache(**legal | changed)


@pytest.mark.parametrize(
    ("argument", "shape", "said"),
    [
        ("indices", (3, 2, 64), r"indices: got shape \[3, 2, 64\]; legal: \[B, S, K\] = \[2, 3, K\]"),
        ("indices", (2, 1, 192), r"indices: got shape \[2, 1, 192\]; legal: \[B, S, K\] = \[2, 3, K\]"),
        ("indices", (2, 192), r"indices: got shape \[2, 192\]; legal: \[B, S, K\] = \[2, 3, K\]"),
        ("topk_length", (1, 2), r"topk_length: got shape \[1, 2\]; legal: \[B\] = \[2\], B from q"),
        ("q", (6, HEADS, 576), r"q: got shape \[6, 4, 576\]; legal: \[B, S, H, D\]"),
    ],
)
def test_shapes_of_sparse_decode(argument: str, shape: tuple[int, ...], said: str) -> None:
    """As many elements as a legal call has are no legal call."""
    q = torch.zeros(2, 3, HEADS, 576, dtype=torch.bfloat16)
    given = {"q": q, "indices": torch.zeros(2, 3, 64, dtype=torch.int32), "topk_length": torch.ones(2).int()}
    given |= {argument: torch.zeros(shape, dtype=given[argument].dtype)}
    with pytest.raises(ValueError, match=said):
        flash_mla.flash_mla_with_kvcache(
            given.pop("q"), torch.zeros(2, 64, 1, 656, dtype=torch.uint8), None, None, 512,
            *flash_mla.get_mla_metadata(), is_fp8_kvcache=True, **given,
        )  # fmt: skip


V32, V4 = torch.zeros(2, 64, 1, 656, dtype=torch.uint8), torch.zeros(2, 37440, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"extra_k_cache": V32}, "extra_k_cache: got tensors; extra_k_cache and extra_indices_in_kvcache go together"),
        ({"extra_topk_length": torch.ones(2)}, "extra_topk_length: got tensors; extra_k_cache and extra_indices"),
        (
            {"extra_k_cache": V32, "extra_indices_in_kvcache": torch.zeros(2, 1, 8, dtype=torch.int32)},
            "extra_k_cache: got a second cache; legal: None, or V4's rows beside V4's rows in k_cache",
        ),
        (
            {
                "q": torch.zeros(2, 1, HEADS, 512, dtype=torch.bfloat16), "k_cache": as_package_pages(V4, 64),
                "extra_k_cache": as_package_pages(V4, 64),
                "extra_indices_in_kvcache": torch.zeros(2, 2, 8, dtype=torch.int32),
            },
            r"extra_indices_in_kvcache: got shape \[2, 2, 8\]; legal: \[B, S, K\] = \[2, 1, K\]",
        ),
        (
            {
                "q": torch.zeros(2, 1, HEADS, 512, dtype=torch.bfloat16), "k_cache": as_package_pages(V4, 64),
                "extra_k_cache": as_package_pages(V4, 64), "topk_length": torch.ones(2),
                "extra_indices_in_kvcache": torch.zeros(2, 1, 8, dtype=torch.int32),
            },
            "topk_length: got dtype float32; legal: int32",
        ),
        (
            {
                "q": torch.zeros(2, 1, HEADS, 512, dtype=torch.bfloat16), "k_cache": as_package_pages(V4, 64),
                "extra_k_cache": as_package_pages(V4, 64),
                "extra_indices_in_kvcache": torch.zeros(2, 1, 8, dtype=torch.int64),
            },
            "extra_indices_in_kvcache: got dtype int64; legal: int32",
        ),
        (
            {"k_cache": torch.zeros(2, 64, 1, 584, dtype=torch.uint8)},
            "k_cache: got strides .* legal: rows of a page side by side, and pages padded to a multiple of 576 bytes",
        ),
    ],
)  # fmt: skip
def test_sparse_caches_that_do_not_fit(changed: dict[str, torch.Tensor], said: str) -> None:
    given = {"q": torch.zeros(2, 1, HEADS, 576, dtype=torch.bfloat16), "k_cache": V32} | changed
    with pytest.raises(ValueError, match=said):
        flash_mla.flash_mla_with_kvcache(
            given.pop("q"), given.pop("k_cache"), None, None, 512, *flash_mla.get_mla_metadata(), is_fp8_kvcache=True,
            indices=torch.zeros(2, 1, 64, dtype=torch.int32), **given,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "shape", "said"),
    [
        ("q", (4, 576), r"q: got shape \[4, 576\]; legal: \[s_q, h_q, d_qk\]"),
        ("kv", (9, 1, 512), r"kv: got shape \[9, 1, 512\]; legal: \[s_kv, 1, 576\], d_qk from q"),
        ("indices", (3, 8), r"indices: got shape \[3, 8\]; legal: \[3, 1, topk\], s_q from q"),
        ("topk_length", (2,), r"topk_length: got shape \[2\]; legal: \[3\], s_q from q"),
    ],
)
def test_shapes_of_sparse_prefill(argument: str, shape: tuple[int, ...], said: str) -> None:
    shapes = {"q": (3, HEADS, 576), "kv": (9, 1, 576), "indices": (3, 1, 8), "topk_length": (3,)} | {argument: shape}
    given = {name: torch.zeros(one, dtype=torch.bfloat16 if name in ("q", "kv") else torch.int32)
             for name, one in shapes.items()}  # fmt: skip
    with pytest.raises(ValueError, match=said):
        flash_mla.flash_mla_sparse_fwd(**given, sm_scale=1.0)


def test_schedule_tensors_can_be_sliced_and_copied() -> None:
    schedule, splits = flash_mla.get_mla_decoding_metadata(torch.ones(5, dtype=torch.int32), 16, 1, 16, True, 2048)
    assert (schedule.shape, schedule.dtype, splits.shape, splits.dtype) == ((1, 8), torch.int32, (6,), torch.int32)
    meta = flash_mla.FlashMLASchedMeta(tile_scheduler_metadata=schedule, num_splits=splits)
    assert meta.tile_scheduler_metadata is schedule and meta.num_splits is splits


def test_scales_of_a_dense_fp8_cache() -> None:
    given = case([70, 3, 129])
    q, cache, tables, lens = given.arrays
    q_scale, k_scale = torch.tensor([0.5]), torch.tensor([0.25])
    fp8 = [(x.float() / scale).to(torch.float8_e4m3fn) for x, scale in ((q, q_scale), (cache, k_scale))]
    meta = flash_mla.FlashMLASchedMeta()
    out, lse = flash_mla.flash_mla_with_kvcache(
        fp8[0], fp8[1].unsqueeze(2), tables, lens, 512, meta, causal=True, is_fp8_kvcache=True, use_legacy=True,
        descale_q=q_scale, descale_k=k_scale, softmax_scale=SCALE,
    )  # fmt: skip
    plain = [x.float() * scale for x, scale in zip(fp8, (q_scale, k_scale), strict=True)]
    expected, expected_lse = flash_mla.flash_mla_with_kvcache(
        plain[0], plain[1].unsqueeze(2), tables, lens, 512, meta, causal=True, softmax_scale=SCALE
    )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=BF16, rtol=BF16)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["descale_q", "descale_k"])
def test_a_scale_of_several_elements(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{name}: got torch.float32 of shape \[2\]; legal: float32 of one element, or None"
    ):
        attend(case([3]), "cpu", **{name: torch.ones(2)})


def test_batch_invariance_reaches_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    run = mla_decode.mla_decode
    monkeypatch.setattr(mla_decode, "mla_decode", lambda *a, **k: (seen.append(k["batch_invariant"]), run(*a, **k))[1])
    attend(case([3]), "cpu", enable_batch_invariant=True)
    attend(case([3]), "cpu")
    assert seen == [True, False]


@pytest.mark.parametrize("kv_format", ["V32_NO_ROPE", "V41_NEW"])
def test_formats_that_no_kernel_reads(kv_format: str) -> None:
    q = torch.zeros(2, 1, HEADS, 576, dtype=torch.bfloat16)
    with pytest.raises(
        NotImplementedError, match=f"kv_format: got '{kv_format}' and V3.2's rows; legal: None, or 'V32'"
    ):
        flash_mla.flash_mla_with_kvcache(
            q, block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=None, kv_format=kv_format,
            **SPARSE,
        )  # fmt: skip


def test_the_format_goes_with_indices() -> None:
    with pytest.raises(ValueError, match="kv_format: got 'V32'; without indices legal: None"):
        attend(case([3]), "cpu", kv_format="V32")


def test_packed_rows_take_no_scale() -> None:
    q = torch.zeros(2, 1, HEADS, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="descale_k: got tensors; with indices legal: None"):
        flash_mla.flash_mla_with_kvcache(
            q, block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=None,
            descale_k=torch.ones(1), **SPARSE,
        )  # fmt: skip


@pytest.mark.parametrize("base", [None, True, False])
def test_the_base_of_a_prompts_lse(base: bool | None) -> None:
    torch.manual_seed(0)
    q, kv = torch.randn(3, HEADS, 576).bfloat16(), torch.randn(9, 1, 576).bfloat16()
    indices = torch.tensor([[[0, 3, -1]], [[1, 8, 2]], [[-1, -1, -1]]], dtype=torch.int32)
    _, _, natural = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE)
    _, none, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE, use_legacy=True, return_log2_lse=base)
    assert none is None and natural is not None
    if base is False:
        assert lse is None
    else:
        assert lse is not None and torch.isposinf(lse[2]).all()
        torch.testing.assert_close(lse, natural * (1 if base is None else np.log2(np.e)))


@pytest.fixture(autouse=True)
def lse_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process without SGLang, and undone after the test."""
    monkeypatch.setattr(selected, "_lse_is_read", True)


def test_an_engine_that_reads_no_lse_gets_that_of_the_operation() -> None:
    torch.manual_seed(0)
    q, kv = torch.randn(2, HEADS, 576).bfloat16(), torch.randn(9, 1, 576).bfloat16()
    indices = torch.tensor([[[0, 3]], [[-1, -1]]], dtype=torch.int32)
    out, _, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE)
    selected.read_no_lse()
    same, _, as_it_is = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE)
    assert lse is not None and as_it_is is not None
    assert torch.isposinf(lse[1]).all() and torch.isneginf(as_it_is[1]).all()
    torch.testing.assert_close((same, as_it_is[0]), (out, lse[0]))
    assert torch.isposinf(attend(case([0]), "cpu")[1]).all()  # without indices SGLang reads it


def test_fused_attention_is_refused_by_name() -> None:
    fused = flash_mla.fused_norm_rope_attn_rope_cast
    for name in ("prefill", "decode"):
        with pytest.raises(NotImplementedError, match=f"fused_norm_rope_attn_rope_cast.{name}: no kernel"):
            getattr(fused, name)(q=None)


@pytest.mark.parametrize("per_request", [1, 3])
@pytest.mark.parametrize("lengths", [(False, False), (True, False), (False, True), (True, True)])
def test_two_selections_become_one(per_request: int, lengths: tuple[bool, bool]) -> None:
    """A request's tokens have its lengths, and a length may be more than all columns."""
    rng, requests, window, count = np.random.default_rng(4), 5, 6, 11
    near, far = (rng.integers(0, 99, (requests * per_request, n)).astype(np.int32) for n in (window, count))
    counts = [rng.integers(0, n + 3, requests).astype(np.int32) if has else None
              for n, has in zip((window, count), lengths, strict=True)]  # fmt: skip
    given = [joining.Columns(torch.tensor(x), None if n is None else torch.tensor(n))
             for x, n in zip((near, far), counts, strict=True)]  # fmt: skip
    found = joining.joined(*given, 4)
    left_out = np.arange(window) >= (window if counts[0] is None else np.repeat(counts[0], per_request)[:, None])
    want = np.concatenate([np.where(left_out, -1, near), far, np.full((len(near), 3), -1)], 1)
    assert np.array_equal(found.slots.numpy(), want)
    if counts[1] is None:
        assert found.lengths is None
    else:
        assert found.lengths is not None and found.lengths.dtype == torch.int32
        assert np.array_equal(found.lengths.numpy(), np.repeat(counts[1], per_request) + window)


@pytest.mark.gpu
def test_a_graph_replays_with_other_selections() -> None:
    """Over two caches, with a schedule that the engine slices and copies: new slots and lengths reach a replay."""
    given = sparse_inputs.call(layout="v4", window=6, selected=11, lengths=False, sinks=True)
    arrays = {name: numbers(array).cuda() for name, array in given.arrays.items()}
    tokens = len(arrays["q"])
    near, far = (x.contiguous() for x in arrays["indices"][:, None].split([6, 5], dim=2))
    counts = [torch.full((tokens,), most, dtype=torch.int32, device="cuda") for most in (6, 5)]
    schedule, splits = flash_mla.get_mla_decoding_metadata(torch.ones(64, device="cuda"), 1, 1)
    metadata = flash_mla.FlashMLASchedMeta(schedule, splits[: tokens + 1].clone())

    def run() -> torch.Tensor:
        return flash_mla.flash_mla_with_kvcache(
            arrays["q"][:, None], as_package_pages(arrays["kv_cache"], 8), None, None, 512, metadata,
            softmax_scale=given.options["softmax_scale"], is_fp8_kvcache=True, indices=near,
            attn_sink=arrays["sinks"], topk_length=counts[0], extra_topk_length=counts[1],
            extra_k_cache=as_package_pages(arrays["compressed_kv_cache"], 6), extra_indices_in_kvcache=far,
        )[0]  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    near.copy_(near.flip(0))
    far.copy_(far.flip(0))
    for count, most in zip(counts, (6, 5), strict=True):
        count.copy_(torch.arange(tokens) % (most + 1))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, run())


def test_the_first_call_loads_the_kernels_of_other_sizes(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_loaded", set())
    loaded: list[Any] = []
    monkeypatch.setattr(warming.op, "warm", lambda spec, index, **given: loaded.append((spec, given)))
    gpu.runs = False
    for tokens in (5, 7):
        q, kv = torch.zeros(tokens, 64, 576, dtype=torch.bfloat16), torch.zeros(90, 1, 576, dtype=torch.bfloat16)
        flash_mla.flash_mla_sparse_fwd(
            q,
            kv,
            torch.zeros(tokens, 1, 64, dtype=torch.int32),
            SCALE,
            topk_length=torch.ones(tokens, dtype=torch.int32),
        )
    assert [spec.num_tokens for spec, _ in loaded] == list(warming.op.WARM_TOKENS)
    assert {(spec.num_heads, spec.q_dtype, given["lengths"], given["sinks"]) for spec, given in loaded} == {
        (64, "bfloat16", True, False)
    }


INSTALL = """
import tsmla_bridge
ours = tsmla_bridge.install_as_flash_mla()
import flash_mla
from flash_mla.flash_mla_interface import FlashMLASchedMeta, get_mla_metadata
assert flash_mla is ours is tsmla_bridge.install_as_flash_mla()
from flash_mla import fused_norm_rope_attn_rope_cast
from flash_mla.fused_norm_rope_attn_rope_cast import prefill
assert isinstance(get_mla_metadata()[0], FlashMLASchedMeta) and FlashMLASchedMeta is flash_mla.FlashMLASchedMeta
"""


def test_engines_import_it_by_its_name(child_environment: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", INSTALL], env=child_environment, check=True)


def test_the_real_package_is_not_replaced(child_environment: dict[str, str]) -> None:
    code = "import sys, types; sys.modules['flash_mla'] = types.ModuleType('flash_mla')\n" + INSTALL
    done = subprocess.run([sys.executable, "-c", code], env=child_environment, capture_output=True, text=True)
    assert "flash_mla was imported already" in done.stderr


def test_results_without_keys_merge_with_others() -> None:
    """The package's lse of +inf for rows that see no key: halves of the keys, one of them empty, merge to the whole."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, 3, 576, generator=generator).bfloat16()
    cache = torch.randn(2, 64, 1, 576, generator=generator).bfloat16()
    table = torch.tensor([[0], [1]], dtype=torch.int32)

    def attend(*lens: int) -> tuple[torch.Tensor, torch.Tensor]:
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, seq_lens, 512, None)
        return out, lse.transpose(1, 2)

    whole, parts = attend(5, 0), (attend(5, 0), attend(0, 0))
    out, lse = tsmla_bridge.merge_attention_states([out for out, _ in parts], [lse for _, lse in parts])
    assert torch.equal(out, whole[0]) and torch.equal(lse[0], whole[1][0]) and (lse[1] == -torch.inf).all()

    rows = torch.arange(5, dtype=torch.int32).expand(2, 1, 5).contiguous()
    some, none = (flash_mla.flash_mla_sparse_fwd(q[:, 0], cache[0], x, 0.1) for x in (rows, torch.full_like(rows, -1)))
    out, lse = tsmla_bridge.merge_attention_states([some[0], none[0]], [some[2], none[2]])
    assert torch.equal(out, some[0]) and torch.equal(lse, some[2]) and (none[2] == torch.inf).all()
