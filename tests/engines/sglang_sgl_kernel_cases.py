"""The backends of SGLang 0.5.17 that import FlashMLA from sgl-kernel (flashmla, dsa), over these kernels.

Run by test_sglang.py in a process of its own."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bridge.inputs import BF16, assert_close
from tests.engines.sglang_dense import check_flashmla_decode
from tests.gpu.small_grid import numbers
from tests.oracles import sparse_inputs
from tsmla_bridge.engines.sglang import heads, sgl_kernel_flash_mla

sgl_kernel_flash_mla.install()

from tests.engines import sglang_model as sglang_model  # noqa: E402  # defines what importing SGLang needs

dense = importlib.import_module("sglang.srt.layers.attention.flashmla_backend")
dsa = importlib.import_module("sglang.srt.layers.attention.dsa_backend").DeepseekSparseAttnBackend


def dsa_self() -> Any:
    """The attributes of SGLang's dsa backend that its calls of FlashMLA read."""
    return SimpleNamespace(
        flashmla_kv_num_q_heads=64, real_page_size=64, kv_cache_dim=656, dsa_kv_cache_store_fp8=True,
        dsa_index_topk=64, device_sm_major=9,
    )  # fmt: skip


@pytest.fixture(params=[False, True], ids=["padded", "own heads"], autouse=True)
def own_heads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's class as it is, and as it is once it has made such a backend."""
    if request.param:
        for name in ("_forward_flashmla_kv", "_forward_flashmla_sparse"):
            monkeypatch.setattr(dsa, name, getattr(dsa, name))  # undone at the end
        backends: dict[str, Any] = {"dsa": lambda runner: runner}
        heads.take_own_heads(backends)
        assert backends["dsa"]("a runner") == "a runner" and hasattr(dsa._forward_flashmla_sparse, "unpads")


def test_dsa_decode() -> None:
    given = sparse_inputs.call(layout="v32", page_size=64, selected=64, lengths=False)
    arrays = {name: numbers(array) for name, array in given.arrays.items()}
    tokens, count, _ = arrays["q"].shape
    self = dsa_self()
    schedule = dsa._compute_flashmla_metadata(self, torch.full((tokens,), 64), 1)
    metadata = SimpleNamespace(
        flashmla_metadata=schedule.slice(slice(0, tokens + 1)),
        dsa_cache_seqlens_int32=torch.full((tokens,), 64, dtype=torch.int32),
    )
    schedule.copy_(schedule)
    out = dsa._forward_flashmla_kv(
        self, arrays["q"], arrays["kv_cache"], 512, given.options["softmax_scale"],
        SimpleNamespace(tp_q_head_num=count, head_dim=576), metadata, arrays["indices"],
    )  # fmt: skip
    assert_close(out[:, 0], given.want()[0], BF16)


def test_dsa_prefill() -> None:
    given = sparse_inputs.call(layout="plain", kv_dtype="bfloat16", lengths=True, heads=4)
    arrays = {name: numbers(array) for name, array in given.arrays.items()}
    scale = given.options["kv_scale"]  # SGLang's rows have none, so the logits and the result bear it
    out = scale * dsa._forward_flashmla_sparse(
        dsa_self(), arrays["q"], arrays["kv_cache"].reshape(-1, 1, 576), 512, arrays["indices"],
        scale * given.options["softmax_scale"], topk_length=arrays["lengths"],
    )  # fmt: skip
    assert_close(out, given.want()[0], BF16)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_flashmla_decode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLABackend.forward_decode with its own schedule tensors."""
    check_flashmla_decode(dense, sgl_kernel_flash_mla.get_mla_metadata, name, monkeypatch)
