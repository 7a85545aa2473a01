"""SGLang's own backends of FlashMLA (flashmla, dsa, dsv4) over the flash_mla that TSMLA_SGLANG=flash_mla gives them.

Run by test_sglang.py in a process of its own."""

from __future__ import annotations

import functools
import importlib
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bridge.inputs import BF16, assert_close
from tests.engines import sglang_model as sglang_model  # defines what importing SGLang needs
from tests.engines.sglang_dense import check_flashmla_decode
from tests.gpu.small_grid import numbers
from tests.oracles import sparse_inputs
from tsmla_bridge.engines.install import install_as_flash_mla
from tsmla_bridge.engines.sglang import heads

install_as_flash_mla()
wrapper = importlib.import_module("sglang.kernels.ops.attention.flash_mla_interface")
dense = importlib.import_module("sglang.srt.layers.attention.flashmla_backend")
dsa = importlib.import_module("sglang.srt.layers.attention.dsa_backend")
dsv4 = importlib.import_module("sglang.srt.layers.attention.deepseek_v4_backend")
ForwardMode = sglang_model.ForwardMode


def dsa_self(**changed: Any) -> Any:
    """The attributes of SGLang's dsa backend that its calls of FlashMLA read."""
    fields = dict(
        flashmla_kv_num_q_heads=64, physical_page_size=64, kv_cache_dim=656, dsa_kv_cache_store_fp8=True,
        flashmla_kv_format="V32", dsa_index_topk=64, device_sm_major=9, _sink_pad_cache={},
    )  # fmt: skip
    return SimpleNamespace(**fields | changed)


def v32_call() -> tuple[sparse_inputs.Call, dict[str, torch.Tensor]]:
    """A call over pages of 64 V3.2 rows, 64 slots a token."""
    given = sparse_inputs.call(layout="v32", page_size=64, selected=64, lengths=False)
    return given, {name: numbers(array) for name, array in given.arrays.items()}


def test_dsa_decode() -> None:
    given, arrays = v32_call()
    tokens, heads, _ = arrays["q"].shape
    self = dsa_self()
    schedule = dsa.DeepseekSparseAttnBackend._compute_flashmla_metadata(self, torch.full((tokens,), 64), 1)
    metadata = SimpleNamespace(
        flashmla_metadata=schedule.slice(slice(0, tokens + 1)),
        dsa_cache_seqlens_int32=torch.full((tokens,), 64, dtype=torch.int32),
    )
    schedule.copy_(schedule)
    out = dsa.DeepseekSparseAttnBackend._forward_flashmla_kv(
        self, arrays["q"], arrays["kv_cache"], 512, given.options["softmax_scale"],
        SimpleNamespace(tp_q_head_num=heads, head_dim=576), metadata, arrays["indices"],
    )  # fmt: skip
    assert_close(out[:, 0], given.want()[0], BF16)


def test_dsa_decode_without_rope_is_refused() -> None:
    _, arrays = v32_call()
    tokens, heads, _ = arrays["q"].shape
    self = dsa_self(flashmla_kv_format="V32_NO_ROPE")
    schedule = dsa.DeepseekSparseAttnBackend._compute_flashmla_metadata(self, torch.full((tokens,), 64), 1)
    metadata = SimpleNamespace(
        flashmla_metadata=schedule, dsa_cache_seqlens_int32=torch.full((tokens,), 64, dtype=torch.int32)
    )
    with pytest.raises(NotImplementedError, match="kv_format: got 'V32_NO_ROPE'"):
        dsa.DeepseekSparseAttnBackend._forward_flashmla_kv(
            self, arrays["q"], arrays["kv_cache"], 512, 1.0,
            SimpleNamespace(tp_q_head_num=heads, head_dim=576), metadata, arrays["indices"],
        )  # fmt: skip


@pytest.mark.parametrize("sinks", [False, True])
def test_dsa_prefill(sinks: bool) -> None:
    given = sparse_inputs.call(layout="plain", kv_dtype="bfloat16", lengths=True, sinks=sinks)
    arrays = {name: numbers(array) for name, array in given.arrays.items()}
    rows = arrays["kv_cache"].reshape(-1, 1, 576)
    scale = given.options["kv_scale"]  # SGLang's rows have none, so the logits and the result bear it
    out = scale * dsa.DeepseekSparseAttnBackend._forward_flashmla_sparse(
        dsa_self(), arrays["q"], rows, 512, arrays["indices"], scale * given.options["softmax_scale"],
        topk_length=arrays["lengths"], attn_sink=arrays.get("sinks"),
    )  # fmt: skip
    assert_close(out, given.want()[0], BF16)


class V4Pool(dsv4.DeepSeekV4TokenToKVPool):  # type: ignore[misc]
    """SGLang's pool of V4 as its backend's forward reads it, around pages that are given."""

    request_window = None

    def __init__(self, near: torch.Tensor, far: torch.Tensor | None) -> None:
        self.near, self.far = near, far

    def get_swa_key_buffer_radix(self, layer_id: int) -> torch.Tensor:
        return self.near

    def get_extra_key_buffer(self, layer_id: int) -> torch.Tensor | None:
        return self.far

    def get_swa_key_page_size(self) -> int:
        return 8

    def get_extra_key_page_size(self, layer_id: int) -> int:
        return 6

    def get_swa_key_bytes_per_token(self) -> int:
        return 584

    def get_extra_key_bytes_per_token(self, layer_id: int) -> int:
        return 584


V4Pool.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_dsv4_decode(ratio: int) -> None:
    """DeepseekV4AttnBackend.forward, over the window alone and beside compressed entries."""
    selected, window = 11, 6 if ratio else None
    given = sparse_inputs.call(layout="v4", window=window, selected=selected, lengths=False, sinks=True)
    arrays = {name: numbers(array) for name, array in given.arrays.items()}
    tokens, heads, _ = arrays["q"].shape
    counts = [window, selected - window] if window else [selected]
    # As SGLang's metadata has them: columns up to a multiple of 64, and how many of them count.
    columns = [
        torch.nn.functional.pad(each, (0, 64 - each.shape[1]), value=-1)
        for each in arrays["indices"].split(counts, dim=1)
    ]
    lengths = [torch.full((tokens,), count, dtype=torch.int32) for count in counts]
    core = object.__new__(dsv4.DSV4AttnMetadata)
    names = [("swa_page_indices", "swa_topk_lengths")]
    names += {
        0: [],
        4: [("c4_sparse_page_indices", "c4_sparse_topk_lengths")],
        128: [("c128_page_indices", "c128_topk_lengths_clamp1")],
    }[ratio]
    for (slots, lens), found, count in zip(names, columns, lengths, strict=True):
        vars(core).update({slots: found, lens: count})
    vars(core)[f"c{ratio}_flashmla_metadata"] = dsv4._create_flashmla_metadata()
    self = SimpleNamespace(
        forward_metadata=SimpleNamespace(core_attn_metadata=core, late_layer_tail=None), mtp_enabled=False,
        token_to_kv_pool=V4Pool(arrays["kv_cache"], arrays.get("compressed_kv_cache")), trtllm_attn=False,
        is_dsv41=False, is_dspark_draft=False, head_dim_v=512, softmax_scale=given.options["softmax_scale"],
        dsv4_prefill_backend=None,
        _flash_mla_with_kvcache=functools.partial(wrapper.flash_mla_with_kvcache, use_legacy=True),
    )  # fmt: skip
    for name in ("_forward_attention", "_use_sparse_prefill"):
        setattr(self, name, MethodType(getattr(dsv4.DeepseekV4AttnBackend, name), self))
    k = arrays["q"][:, :1]
    out = dsv4.DeepseekV4AttnBackend.forward(
        self, arrays["q"], k, k, SimpleNamespace(layer_id=0, tp_q_head_num=heads, v_head_dim=512),
        SimpleNamespace(forward_mode=ForwardMode.DECODE), compress_ratio=ratio, save_kv_cache=False,
        attn_sink=arrays["sinks"],
    )  # fmt: skip
    assert_close(out, given.want()[0], BF16)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_flashmla_decode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLABackend.forward_decode with its own schedule tensors."""
    check_flashmla_decode(dense, wrapper.get_mla_metadata, name, monkeypatch)


# ---- heads


@pytest.fixture
def own_heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """SGLang's classes as they are once it has made such backends; the heads of each call of the package."""
    v4 = importlib.import_module("sglang.srt.models.deepseek_v4").MqaAttentionBase
    for owner, names in (
        (dsa.DeepseekSparseAttnBackend, ("_forward_flashmla_kv", "_forward_flashmla_sparse")),
        (v4, ("_kernel_num_heads",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # undone at the end
    backends: dict[str, Any] = {"dsa": lambda runner: runner, "dsv4": lambda runner: runner, "fa3": None}
    for _ in range(2):
        heads.take_own_heads(backends)
        assert [backends[name]("a runner") for name in ("dsa", "dsv4")] == ["a runner"] * 2
    assert backends["fa3"] is None
    seen: list[int] = []
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        call = getattr(wrapper, name)

        def recorded(*arguments: Any, call: Any = call, **named: Any) -> Any:
            seen.append((arguments[0] if arguments else named["q"]).shape[-2])
            return call(*arguments, **named)

        monkeypatch.setattr(wrapper, name, recorded)
    return seen


def test_dsa_pads_no_heads(own_heads: list[int]) -> None:
    """Neither in decode nor in prompts; with the results of padded queries."""
    test_dsa_decode()
    test_dsa_prefill(sinks=True)
    count = v32_call()[1]["q"].shape[1]
    assert own_heads == [count, sparse_inputs.call(layout="plain", kv_dtype="bfloat16").arrays["q"].shape[1]]
    assert 64 not in own_heads


@pytest.mark.parametrize(("is_dsv41", "heads_of_a_call"), [(False, 16), (True, 64)])
def test_v4_pads_no_heads(own_heads: list[int], is_dsv41: bool, heads_of_a_call: int) -> None:
    layer = importlib.import_module("sglang.srt.models.deepseek_v4").MqaAttentionBase
    given = SimpleNamespace(is_dsv41=is_dsv41, n_local_heads=16, n_heads=128, attn_tp_size=8)
    assert layer._kernel_num_heads(given, 4) == heads_of_a_call


def test_another_version_keeps_its_padding(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(dsa, "DeepseekSparseAttnBackend", SimpleNamespace())
    backends: dict[str, Any] = {"dsa": lambda runner: runner}
    heads.take_own_heads(backends)
    assert backends["dsa"](3) == 3 and "queries stay padded" in caplog.text
