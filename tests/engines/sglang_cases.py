"""The backend under SGLang's own pools, layers and forward methods. Run by test_sglang.py in a process of its own."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines import sglang_model
from tests.engines.sglang_model import DECODE, DRAFT_EXTEND, EXTEND, HEADS, NOPE, ROPE, VERIFY, Model, settings
from tsmla_bridge.engines import sglang as plugin
from tsmla_bridge.engines.sglang.backend import forward_method
from tsmla_bridge.ops import mla_decode

BF16 = 2**-7
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module", params=[torch.bfloat16, FP8], ids=str)
def kv_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def queries(count: int) -> torch.Tensor:
    return torch.randn(count, HEADS, 576, dtype=torch.bfloat16)


def assert_close(got: torch.Tensor, want: np.ndarray) -> None:
    np.testing.assert_allclose(got.double().numpy().reshape(want.shape), want, atol=BF16, rtol=BF16)


@pytest.mark.parametrize("apart", [False, True], ids=["one query", "rope apart"])
def test_decode(kv_dtype: torch.dtype, apart: bool) -> None:
    model, lens = Model(kv_dtype=kv_dtype), [70, 1, 129]
    batch, q = model.batch(DECODE, [1, 1, 1], lens, lens), queries(3)
    assert_close(model.attend(batch, q, apart=apart), model.want(batch, q)[0])


def test_the_pool_is_read_without_the_layers_scale() -> None:
    """A checkpoint may have one for its fp8 cache. What writes to the pool doesn't divide by it."""
    model, lens = Model(kv_dtype=FP8), [70, 1, 129]
    model.mqa.k_scale, model.mqa.k_scale_float = torch.tensor(0.5), 0.5
    batch, q = model.batch(DECODE, [1, 1, 1], lens, lens), queries(3)
    assert_close(model.attend(batch, q, apart=True), model.want(batch, q)[0])


def test_rope_apart_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lens = Model(), [70, 1, 129]
    seen: list[Any] = []
    attend = mla_decode.mla_decode
    monkeypatch.setattr(mla_decode, "mla_decode", lambda q, *a, **k: (seen.append(q), attend(q, *a, **k))[1])
    model.attend(model.batch(DECODE, [1, 1, 1], lens, lens), queries(3), apart=True, dense=True)
    ((latent, rope),) = seen
    assert latent.shape == (3, 1, HEADS, 512) and rope.stride(-2) == 576
    assert plugin.NAME in sglang_model.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS


def test_target_verify(kv_dtype: torch.dtype) -> None:
    """The lengths don't count the drafts yet."""
    model, lens = Model(kv_dtype=kv_dtype, drafts=4), [70, 4, 131]
    batch, q = model.batch(VERIFY, [4] * 3, lens, [n - 4 for n in lens]), queries(12)
    assert_close(model.attend(batch, q), model.want(batch, q)[0])


def test_draft_extend(kv_dtype: torch.dtype) -> None:
    """Every request has as many rows as there are drafts; those behind its new tokens are padding."""
    model, new = Model(kv_dtype=kv_dtype, drafts=4), [2, 4, 1]
    padded = [70 + 4, 64 + 4, 5 + 4]
    batch, q = model.batch(DRAFT_EXTEND, [4] * 3, padded, [70 + 2, 64 + 4, 5 + 1]), queries(12)
    batch.forward.extend_seq_lens = torch.tensor(new)
    out = model.attend(batch, q).view(3, 4, HEADS, -1)
    want = model.want(batch, q)[0].reshape(3, 4, HEADS, -1)
    for b, count in enumerate(new):
        assert_close(out[b, :count], want[b, :count])


def test_absorbed_prompts() -> None:
    """A prompt whose prefix is cached, as a graph of prefill runs it."""
    model, new, lens = Model(), [5, 40, 1], [70, 40, 129]
    batch, q = model.batch(EXTEND, new, lens, lens), queries(46)
    assert_close(model.attend(batch, q), model.want(batch, q)[0])


@pytest.mark.parametrize("lens", [[40, 33, 1], [70, 140, 129]], ids=["no prefix", "a prefix in chunks"])
def test_prompts(lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's chunked method: new tokens by themselves, and over chunks of the prefix, merged by lse."""
    monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", "150")  # 50 tokens of each request
    model, new = Model(), [40, 33, 1]
    batch = model.batch(EXTEND, new, lens, lens)
    q = torch.randn(sum(new), HEADS, NOPE + ROPE, dtype=torch.bfloat16)
    assert_close(model.prefill(batch, q), model.want_expanded(batch, q))
    assert batch.forward.num_prefix_chunks in (None, 3)


@pytest.mark.parametrize(("mode", "drafts"), [(DECODE, 0), (VERIFY, 4), (DRAFT_EXTEND, 4)], ids=str)
def test_graphs_read_memory_of_their_own(mode: Any, drafts: int) -> None:
    model, lens = Model(drafts=drafts), [70, 30, 129]
    count = drafts or 1
    counted = [n - drafts for n in lens] if mode is VERIFY else lens
    batch, q = model.batch(mode, [count] * 3, lens, counted), queries(3 * count)
    backend = model.backend
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=32)
    with settings(drafts):
        backend.init_forward_metadata_out_graph(batch.forward, in_capture=True)
    metadata = backend.forward_metadata
    assert metadata.block_tables.data_ptr() == backend.graph_tables.data_ptr()
    assert metadata.seq_lens.data_ptr() == backend.graph_lens.data_ptr()
    assert metadata.seq_lens.tolist() == lens and metadata.q_len == count
    model.backend.init_forward_metadata = lambda forward: None
    assert_close(model.attend(batch, q), model.want(batch, q)[0])


def test_the_way_of_a_batch() -> None:
    def way(mode: Any, prefix: list[int], disabled: bool = False) -> str:
        forward = SimpleNamespace(forward_mode=mode, extend_prefix_lens_cpu=prefix)
        return forward_method(SimpleNamespace(disable_chunked_prefix_cache=disabled), forward).name

    assert way(EXTEND, [0, 0]) == way(EXTEND, [5, 0]) == way(EXTEND, [0], disabled=True) == "MHA_CHUNKED_KV"
    assert way(DECODE, []) == way(VERIFY, []) == way(DRAFT_EXTEND, []) == way(EXTEND, [5], disabled=True) == "MLA"


def test_refusals() -> None:
    def refused(error: type[Exception], said: str, topk: int = 1, **changed: Any) -> None:
        runner = SimpleNamespace(**(vars(Model().runner) | changed))
        with pytest.raises(error, match=said), settings(0, topk=topk):
            plugin.create_backend(runner)

    refused(NotImplementedError, "page size is 1; .*; pass --page-size 64", page_size=1)
    refused(ValueError, "a model without MLA", use_mla_backend=False)
    refused(ValueError, "speculative-eagle-topk: got 4", topk=4)
    refused(NotImplementedError, "unified memory", kv_index_translator=SimpleNamespace(is_translating=True))
    refused(NotImplementedError, "kv_cache.dtype is float8_e5m2", kv_cache_dtype=torch.float8_e5m2)


def test_registration_by_sglangs_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.plugins as loader
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    point = importlib.metadata.EntryPoint("tsmla", "tsmla_bridge.engines.sglang:register", loader.GENERAL_PLUGINS_GROUP)
    monkeypatch.setattr(
        loader, "entry_points", lambda group: [point] if group == loader.GENERAL_PLUGINS_GROUP else []
    )
    monkeypatch.setattr(loader, "_plugins_loaded", False)
    ATTENTION_BACKENDS.pop(plugin.NAME, None)
    loader.load_plugins()
    plugin.register()  # again
    assert ATTENTION_BACKENDS[plugin.NAME] is plugin.create_backend
    assert choices.ATTENTION_BACKEND_CHOICES.count(plugin.NAME) == 1
    assert plugin.NAME in choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS
    assert AttentionBackendRegistry.get_handler(plugin.NAME) is forward_method
    assert sglang_model.PAGE == 64
