"""The backend under SGLang's own pools, layers and forward methods. Run by test_sglang.py in a process of its own."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines import sglang_model
from tests.engines.sglang_model import (
    DECODE,
    DRAFT_EXTEND,
    EXTEND,
    HEADS,
    NOPE,
    ROPE,
    VERIFY,
    AttentionType,
    Model,
    Ranks,
    get_spec,
    settings,
)
from tsmla_bridge.engines import sglang as plugin
from tsmla_bridge.engines.sglang import backend
from tsmla_bridge.engines.sglang.backend import forward_method
from tsmla_bridge.ops import mla_decode
from tsmla_kernels.sm90.decode.config import decode_config

BF16 = 2**-7
IS_0_5_17 = backend.sglang.__version__ == "0.5.17"
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


@pytest.mark.parametrize(("new", "lens"), [([5, 40, 1], [70, 40, 129]), ([1, 2, 3], [70, 66, 131])])
def test_absorbed_prompts(new: list[int], lens: list[int]) -> None:
    """Prompts whose prefixes are cached, up to few tokens, as a graph of prefill runs them."""
    model = Model()
    batch, q = model.batch(EXTEND, new, lens, lens), queries(sum(new))
    assert_close(model.attend(batch, q), model.want(batch, q)[0])


@pytest.mark.parametrize("new", [[40, 33, 1], [2, 3, 1]], ids=str)
@pytest.mark.parametrize("lens", [[40, 33, 1], [70, 140, 129]], ids=["no prefix", "a prefix in chunks"])
def test_prompts(new: list[int], lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's chunked method: new tokens by themselves, and over chunks of the prefix, merged by lse."""
    monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", "150")  # 50 tokens of each request
    model = Model()
    batch = model.batch(EXTEND, new, lens, lens)
    q = torch.randn(sum(new), HEADS, NOPE + ROPE, dtype=torch.bfloat16)
    assert_close(model.prefill(batch, q), model.want_expanded(batch, q))
    assert batch.forward.num_prefix_chunks in (None, 1, 3)


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


@pytest.mark.skipif(not IS_0_5_17, reason="later versions share a request's keys: sglang_ranks_cases.py")
def test_ranks_of_context_parallelism_are_refused() -> None:
    runner = Model().runner
    with (
        settings(0, Ranks(2, comm="")),
        pytest.raises(NotImplementedError, match=r"--dcp-size: got 2; .* SGLang 0\.5\.17"),
    ):
        plugin.create_backend(runner)


def with_config(**changed: Any) -> Any:
    """A runner whose model's configuration has these too."""
    runner = Model().runner
    return SimpleNamespace(**(vars(runner) | {"model_config": SimpleNamespace(**vars(runner.model_config), **changed)}))


@pytest.mark.parametrize("where", ["hf_config", "hf_text_config"])
@pytest.mark.parametrize(
    "architecture",
    ["DeepseekV32ForCausalLM", "DeepseekV3ForCausalLMNextN", "GlmMoeDsaForCausalLM", "LongcatFlashForCausalLM",
     "HYV4ForCausalLM"],
)  # fmt: skip
def test_models_with_an_indexer_are_refused_by_name(architecture: str, where: str) -> None:
    """SGLang would run them without it, over all keys."""
    if architecture == "HYV4ForCausalLM" and IS_0_5_17:
        pytest.skip("SGLang 0.5.17 has no such model")
    config = SimpleNamespace(architectures=[architecture], index_topk=2048)
    said = r"got a model with DeepSeek's sparse attention .* --attention-backend dsa"
    with pytest.raises(ValueError, match=said), settings(0):
        plugin.create_backend(with_config(**{where: config}))
    config.index_topk = None
    with settings(0):
        plugin.create_backend(with_config(**{where: config}))


def test_models_with_a_sliding_window_are_refused() -> None:
    for changed in ({"is_hybrid_swa": True}, {"swa_kv_lora_rank": 256}):
        with pytest.raises(NotImplementedError, match="got a model with sliding windows"), settings(0):
            plugin.create_backend(with_config(**changed))
    with settings(0):
        plugin.create_backend(with_config(is_hybrid_swa=False, swa_kv_lora_rank=512))


@pytest.mark.parametrize("where", ["hf_config", "hf_text_config"])
def test_queries_that_are_scaled_by_position_stay_in_one_tensor(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's code scales the concatenated ones alone, of a draft or its target. The configuration may be that of a
    model's text."""
    names = sglang_model.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    before = list(names)
    monkeypatch.setattr(backend.TsmlaBackend, "has_scaled_queries", False)
    config = SimpleNamespace(architectures=["MistralLarge3ForCausalLM"], llama_4_scaling={"beta": 0.1})
    runner = with_config(**{where: config})
    assert plugin.NAME in names
    try:
        with settings(0):
            plugin.create_backend(runner)
        assert plugin.NAME not in names
        assert Model().runner and plugin.NAME not in names
    finally:
        names[:] = before


@pytest.mark.parametrize(
    ("name", "value"),
    [("sliding_window_size", 128), ("logit_cap", 30.0), ("is_cross_attention", True),
     ("attn_type", AttentionType.ENCODER_ONLY)],
)  # fmt: skip
def test_layers_with_attention_of_another_kind_are_refused(name: str, value: Any) -> None:
    model, lens = Model(), [40, 33]
    batch, q = model.batch(EXTEND, lens, lens, lens), torch.randn(73, HEADS, NOPE + ROPE, dtype=torch.bfloat16)
    for layer in (model.mqa, model.mha):
        setattr(layer, name, value)
    with pytest.raises(NotImplementedError, match=f"layer 0 has .*{name} "):
        model.prefill(batch, q)
    with pytest.raises(NotImplementedError, match=f"layer 0 has .*{name} "):
        model.attend(batch, queries(73))


def test_arguments_that_no_kernel_has_are_refused() -> None:
    model, lens = Model(), [40]
    batch = model.batch(EXTEND, lens, lens, lens)
    for layer in (model.mqa, model.mha):
        q = torch.zeros(40, layer.tp_q_head_num, layer.head_dim, dtype=torch.bfloat16)
        with pytest.raises(NotImplementedError, match="sinks: tsmla takes no such argument"), settings(0):
            model.backend.forward_extend(q, q, q, layer, batch.forward, sinks=torch.zeros(HEADS))


def test_drafts_from_a_corpus_are_refused() -> None:
    runner, given = Model().runner, {"speculative_ngram_external_corpus_path": "texts"}
    with settings(0), get_spec().override(**given), pytest.raises(ValueError, match="external-corpus-path: got texts"):
        plugin.create_backend(runner)


# ---- kernels


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("apart", [False, True], ids=["one query", "rope apart"])
def test_every_kernel_that_is_asked_for_is_compiled_before_the_first_request(
    drafts: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(drafts=drafts)
    warmed: set[Any] = set()

    def warm(spec: Any, index: int, *, split_q: bool) -> None:
        warmed.add(decode_config(spec, split_q=split_q))

    def record(q: Any, cache: torch.Tensor, tables: Any, lens: torch.Tensor, **given: Any) -> torch.Tensor:
        parts = q if isinstance(q, tuple) else (q,)
        ragged = given.get("cu_seqlens_q") is not None
        tokens = len(parts[0]) if ragged else parts[0].shape[0] * parts[0].shape[1]
        spec = model.backend._decode_spec(given["max_q_len"] if ragged else parts[0].shape[1])
        spec = dataclasses.replace(spec, total_q_len=tokens, ragged=ragged, batch=len(lens))
        asked.append(decode_config(spec, split_q=len(parts) == 2))
        return torch.zeros(*parts[0].shape[:-1], 512, dtype=torch.bfloat16)

    asked: list[Any] = []
    monkeypatch.setattr(mla_decode, "warm", warm)
    monkeypatch.setattr(mla_decode, "mla_decode", record)
    monkeypatch.setattr(backend.mla_prefill, "warm", lambda *arguments, **options: None)
    monkeypatch.setattr(backend.devices, "index_of", lambda device: 0)
    model.backend._compile((NOPE + ROPE, 128))
    prompts = [[1], [2], [3], [2, 3], [1] * 4, [5], [8], [9], [16, 2], [63], [64], [65], [300], [511], [512]]
    for new in prompts:
        model.attend(model.batch(EXTEND, new, new, new), queries(sum(new)), apart=apart, dense=True)
    model.attend(model.batch(DECODE, [1, 1], [70, 9], [70, 9]), queries(2), apart=apart, dense=True)
    if drafts:
        for mode, counted in ((VERIFY, [66, 5]), (DRAFT_EXTEND, [70, 9])):
            batch = model.batch(mode, [4, 4], [70, 9], counted)
            model.attend(batch, queries(8), apart=apart, dense=True)
    assert set(asked) <= warmed and len(warmed) == 2 * (2 if drafts == 0 else 3)


def test_registration_by_sglangs_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.plugins as loader
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    point = importlib.metadata.EntryPoint("tsmla", "tsmla_bridge.engines.sglang:register", loader.GENERAL_PLUGINS_GROUP)
    monkeypatch.setattr(loader, "entry_points", lambda group: [point] if group == loader.GENERAL_PLUGINS_GROUP else [])
    monkeypatch.setattr(loader, "_plugins_loaded", False)
    choices = plugin._choices()
    ATTENTION_BACKENDS.pop(plugin.NAME, None)
    loader.load_plugins()
    plugin.register()  # again
    assert ATTENTION_BACKENDS[plugin.NAME] is plugin.create_backend
    assert choices.ATTENTION_BACKEND_CHOICES.count(plugin.NAME) == 1
    # SGLang itself refuses deterministic inference with a backend that is missing here.
    assert plugin.NAME not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert plugin.NAME in choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS
    assert AttentionBackendRegistry.get_handler(plugin.NAME) is forward_method
    assert sglang_model.PAGE == 64
