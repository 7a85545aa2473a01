"""The drop-in for package flash_mla: its signatures, layouts, base of lse and rows without keys."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from tests.bridge.inputs import BF16, Inputs, assert_close, inputs
from tests.gpu.small_grid import numbers
from tests.oracles import sparse_inputs
from tsmla_bridge.engines import flash_mla

HEADS, SCALE = 4, 192**-0.5

# flash_mla 1.0.0: names, and defaults where there are some.
SIGNATURES: dict[str, dict[str, Any]] = {
    "get_mla_metadata": {"args": ..., "kwargs": ...},
    "flash_mla_with_kvcache": {
        "q": ..., "k_cache": ..., "block_table": ..., "cache_seqlens": ..., "head_dim_v": ...,
        "tile_scheduler_metadata": ..., "num_splits": None, "softmax_scale": None, "causal": False,
        "is_fp8_kvcache": False, "indices": None, "attn_sink": None, "extra_k_cache": None,
        "extra_indices_in_kvcache": None, "topk_length": None, "extra_topk_length": None,
    },
    "flash_mla_sparse_fwd": {
        "q": ..., "kv": ..., "indices": ..., "sm_scale": ..., "d_v": 512, "attn_sink": None, "topk_length": None,
        "indexer_topk": 0,
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


def test_an_fp8_cache() -> None:
    given = case([70, 5], q_dtype="bfloat16", kv_dtype="float8_e4m3fn")
    out, _ = attend(given, "cpu", is_fp8_kvcache=True, causal=True)
    assert_close(out, given.want(scale=SCALE)[0], BF16)


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
    assert_close(out[:, 0].cpu(), want, BF16)
    assert_close(lse[..., 0].cpu(), np.where(np.isneginf(want_lse), np.inf, want_lse), 1e-3)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        (
            {"indices": torch.zeros(2, 1, 64, dtype=torch.int32), "is_fp8_kvcache": True},
            NotImplementedError,
            r"got indices for a k_cache of shape \[.*\]: of sparse attention only decode over DeepSeek-V3.2",
        ),
        ({"extra_k_cache": torch.zeros(1)}, NotImplementedError, "got extra_k_cache: of sparse attention only"),
        ({"indices": torch.zeros(2, 1, 64, dtype=torch.int32)}, ValueError, "causal, is_fp8_kvcache: got False, False"),
        ({"attn_sink": torch.zeros(HEADS)}, ValueError, "attn_sink: got tensors; they go with indices alone"),
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


def test_sparse_prefill_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="flash_mla_sparse_fwd: of sparse attention only"):
        flash_mla.flash_mla_sparse_fwd(torch.zeros(1), torch.zeros(1), torch.zeros(1), 1.0)


INSTALL = """
import tsmla_bridge
ours = tsmla_bridge.install_as_flash_mla()
import flash_mla
from flash_mla.flash_mla_interface import FlashMLASchedMeta, get_mla_metadata
assert flash_mla is ours is tsmla_bridge.install_as_flash_mla()
assert isinstance(get_mla_metadata()[0], FlashMLASchedMeta) and FlashMLASchedMeta is flash_mla.FlashMLASchedMeta
"""


def test_engines_import_it_by_its_name(child_environment: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", INSTALL], env=child_environment, check=True)


def test_the_real_package_is_not_replaced(child_environment: dict[str, str]) -> None:
    code = "import sys, types; sys.modules['flash_mla'] = types.ModuleType('flash_mla')\n" + INSTALL
    done = subprocess.run([sys.executable, "-c", code], env=child_environment, capture_output=True, text=True)
    assert "flash_mla was imported already" in done.stderr
