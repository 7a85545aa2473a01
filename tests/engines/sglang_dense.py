"""SGLang's dense backend of FlashMLA in a decode step, in any of its versions."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bridge.inputs import BF16, assert_close, inputs

HEADS, SCALE = 4, 192**-0.5


def check_flashmla_decode(
    dense: ModuleType, get_mla_metadata: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashMLABackend.forward_decode of `dense`, its module, with its own schedule tensors, over a cache of dtype
    `name`."""
    kv_dtype = getattr(torch, name)
    given = inputs([70, 3, 129], latent_dim=512, rope_dim=64, heads=HEADS, page_size=64, q_dtype=name, kv_dtype=name)
    q, cache, tables, lens = given.arrays
    q = q.to(torch.bfloat16)  # SGLang's queries before it quantises them, by a scale of 1
    fp8 = kv_dtype != torch.bfloat16
    schedule, splits = get_mla_metadata(lens, HEADS, 1, is_fp8_kvcache=fp8)
    pool = SimpleNamespace(get_key_buffer=lambda layer: cache.reshape(-1, 1, 576))
    self = SimpleNamespace(
        forward_metadata=dense.FlashMLADecodeMetadata(schedule, splits, tables), data_type=kv_dtype,
        is_fp8_kvcache=fp8, kv_lora_rank=512, kv_cache_dim=576, page_size=64, token_to_kv_pool=pool, dcp_world_size=1,
    )  # fmt: skip
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=HEADS, head_dim=576, v_head_dim=512, scaling=SCALE, k_scale=None, k_scale_float=None
    )
    batch = SimpleNamespace(batch_size=3, seq_lens=lens, out_cache_loc=None, token_to_kv_pool=pool)
    monkeypatch.setattr(dense, "get_token_to_kv_pool", lambda: pool, raising=False)
    if fp8:
        quantised = lambda x, scale: (x.to(torch.float8_e4m3fn), scale)  # noqa: E731
        monkeypatch.setattr(dense, "scaled_fp8_quant", quantised, raising=False)
    out = dense.FlashMLABackend.forward_decode(self, q, None, None, layer, batch, save_kv_cache=False)
    assert_close(out.view(3, 1, HEADS, 512), given.want(scale=SCALE)[0], BF16)
