"""The plug-in under vLLM's own layer, builder and implementation. Run by test_vllm.py in a process for each version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.mla.prefill import registry as prefill_registry
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import tsmla_bridge
from tests.engines import vllm_layer
from tests.engines.vllm_layer import HEADS, NOPE, V_DIM, Layer, TsmlaMLABackend, TsmlaMLAPrefillBackend, known
from tsmla_bridge.engines import vllm as plugin
from tsmla_bridge.engines.vllm import decode

ERROR = 2**-7  # bf16: the kernels' results and the layer's products are rounded to it
FP8_ERROR = 0.06  # e4m3 has 3 bits of fraction
HOPPER = SimpleNamespace(major=9, minor=0)
VERSION = tuple(int(number) for number in vllm.__version__.split(".")[:2])


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    vllm_layer.start()


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


@pytest.fixture(scope="module")
def speculative() -> Layer:
    """With three drafts a step."""
    return Layer(drafts=3)


MIXED = [
    pytest.param([1, 1, 3, 40], [70, 5, 66, 40], id="decodes, a short extend and a prefill"),
    pytest.param([1, 20, 40], [130, 90, 170], id="prefills with context"),
    pytest.param([1, 20, 40], [130, 90, 40], id="prefills, the last one without context"),
    pytest.param([1, 1, 1], [1, 64, 129], id="decodes"),
    pytest.param([1, 1, 2, 3], [70, 129, 66, 131], id="decodes and prompts with 2 and 3 tokens that are not cached"),
    pytest.param([2, 1, 3, 40], [130, 65, 3, 40], id="prompts with 1 to 3 tokens that are not cached, and a whole one"),
]


@pytest.mark.parametrize(("new", "lens"), MIXED)
def test_batches(layer: Layer, new: list[int], lens: list[int]) -> None:
    assert layer.error(layer.batch(new, lens)) < ERROR


def test_prefill_writes_where_it_is_told(layer: Layer) -> None:
    """The result is the tensor that was given, as Kimi-K3's layer in vLLM demands, and nothing lies beside it. lse is
    float32 and dense, as merging reads it."""
    batch = layer.batch([20, 40], [20, 40])
    backend = layer.metadata(batch).prefill.prefill_backend
    assert backend.supports_out()
    wide = torch.randn(60, HEADS, NOPE + V_DIM, dtype=torch.bfloat16)
    given = batch.q, torch.randn_like(batch.q), wide[..., NOPE:]
    want, lse = backend.run_prefill_new_tokens(*given, True)
    assert want.is_contiguous() and lse.is_contiguous() and (lse.shape, lse.dtype) == ((HEADS, 60), torch.float32)
    rows, columns = ((62, HEADS, V_DIM), slice(1, -1), slice(None)), ((60, HEADS, 2 * V_DIM), slice(None), slice(V_DIM))
    for shape, tokens, values in (rows, columns):
        whole = torch.zeros(shape, dtype=torch.bfloat16)
        place = whole[tokens, :, values]
        for return_lse in (True, False):
            results = backend.run_prefill_new_tokens(*given, return_lse, out=place)
            returned = results[0] if return_lse else results
            assert returned.data_ptr() == place.data_ptr() and torch.equal(place, want)
        assert whole.count_nonzero() == want.count_nonzero()


def test_context_in_several_chunks(layer: Layer) -> None:
    layer.builder.chunked_prefill_workspace_size = 256
    try:
        batch = layer.batch([1, 20, 30], [70, 500, 350])
        assert layer.error(batch) < ERROR
        context = layer.metadata(batch).prefill.chunked_context
        assert len(context.chunks if hasattr(context, "chunks") else context.cu_seq_lens) > 1
    finally:
        layer.builder.chunked_prefill_workspace_size = layer.builder.chunked_prefill_workspace.shape[0]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"cache_dtype": "fp8"}, FP8_ERROR),
        ({"dtype": "float16"}, ERROR),
        ({"cache_dtype": "fp8", "dtype": "float16"}, FP8_ERROR),
        ({"page_size": 16}, ERROR),
        ({"page_size": 128}, ERROR),
        ({"latent": 256}, ERROR),
        ({"rope": 0}, ERROR),
    ],
    ids=str,
)
def test_caches_and_sizes(options: dict[str, Any], error: float) -> None:
    if options.get("rope") == 0 and VERSION < (0, 30):
        pytest.skip("this version's layer takes no rope width of 0")
    layer = Layer(**options)
    assert layer.error(layer.batch([1, 1, 3, 30], [70, 5, 66, 100])) < error


def test_scales_of_a_checkpoint() -> None:
    """vLLM divides by its tensors what it writes and quantises; attention multiplies with them."""
    layer = Layer(cache_dtype="fp8")
    for name, scale in (("q", 0.25), ("k", 0.5)):
        getattr(layer.layer, f"_{name}_scale").fill_(scale)
    assert layer.error(layer.batch([1, 3, 30], [70, 66, 100])) < FP8_ERROR


def test_16_bit_queries_over_an_fp8_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the variable says so; and in a model of float16, because a call of fp8 queries returns bfloat16."""
    seen: list[torch.dtype] = []
    attend = decode.op.mla_decode
    monkeypatch.setattr(decode.op, "mla_decode", lambda q, *a, **k: (seen.append(q[0].dtype), attend(q, *a, **k))[1])
    for dtype, variable in (("bfloat16", "0"), ("float16", "1")):
        monkeypatch.setenv("TSMLA_VLLM_FP8_QUERIES", variable)
        layer = Layer(cache_dtype="fp8", dtype=dtype)
        assert not layer.impl.supports_quant_query_input
        assert layer.error(layer.batch([1, 1], [70, 33])) < FP8_ERROR
    assert seen == [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("new", "q_len", "bound"), [([4, 4, 4], 4, 4), ([4, 2, 1], None, 4), ([1, 1, 1], 1, 4), ([7, 4, 1], None, 16)]
)
def test_drafts(speculative: Layer, new: list[int], q_len: int | None, bound: int) -> None:
    """Equal and unequal numbers of drafts: each has a kernel that was compiled at the start."""
    batch = speculative.batch(new, [70, 129, 40])
    assert speculative.error(batch) < ERROR
    metadata = speculative.metadata(batch).decode
    assert (metadata.q_len, metadata.max_q_len) == (q_len, bound)


def test_graphs_have_padded_requests(speculative: Layer) -> None:
    """Requests without tokens behind the others, whose tokens are there all the same."""
    layer, batch = speculative, speculative.batch([4, 4], [70, 9])
    metadata = layer.metadata(batch, padding=(1, 4))
    assert metadata.decode.q_len == 4
    cache = vllm_layer.filled(layer, batch)
    q = torch.randn(12, HEADS, 576, dtype=torch.bfloat16)
    out, lse = layer.impl.forward_mqa(q, cache, metadata, layer.layer)
    assert out.shape == (12, HEADS, 512) and lse is None
    assert not out[8:].any() and out[:8].any()


@pytest.mark.parametrize("page_size", [16, 64])
def test_blocks_shared_with_pages_of_other_sizes(page_size: int) -> None:
    """vLLM's own plan of such blocks, as a draft model's layer makes them, and decode over the pages in them."""
    if VERSION < (0, 33):
        pytest.skip("this version doesn't ask backends how far apart blocks must lie")
    from vllm.v1.core import kv_cache_planning
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
    from vllm.v1.worker.utils import customize_attention_spec

    layer = Layer(page_size=page_size)
    spec = customize_attention_spec(TsmlaMLABackend, layer.layer.get_kv_cache_spec(layer.config))
    other = FullAttentionSpec(block_size=page_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    kinds = SimpleNamespace(is_block_outermost=True), SimpleNamespace(is_block_outermost=False)
    alone = [KVCacheGroupSpec(["a", "b"], spec)]
    beside = [KVCacheGroupSpec(["a"], spec), KVCacheGroupSpec(["c"], other)]
    plan = kv_cache_planning._get_kv_cache_bytes_per_block
    assert [plan(alone, kind) for kind in kinds] == [2 * spec.page_size_bytes] * 2  # without others nothing is added

    batch = layer.batch([1, 1], [70, 129])
    cache, metadata = vllm_layer.filled(layer, batch), layer.metadata(batch)
    q = torch.randn(2, HEADS, 576, dtype=torch.bfloat16)
    want, _ = layer.impl.forward_mqa(q, cache, metadata, layer.layer)
    blocks = torch.full((len(cache), plan(beside, kinds[0]) // 2), torch.nan, dtype=torch.bfloat16)
    shared = blocks[:, : cache[0].numel()].view(cache.shape)
    got, _ = layer.impl.forward_mqa(q, shared.copy_(cache), metadata, layer.layer)
    assert torch.equal(got, want)


def test_drafts_that_see_all_keys(speculative: Layer) -> None:
    if VERSION < (0, 30):
        pytest.skip("this version has no such metadata")
    layer, batch = speculative, speculative.batch([4, 4], [70, 9])
    layer.builder.non_causal_multi_token_decode = True
    try:
        metadata = layer.metadata(batch, causal=False)
    finally:
        layer.builder.non_causal_multi_token_decode = False
    cache, q = vllm_layer.filled(layer, batch), torch.randn(8, HEADS, 576, dtype=torch.bfloat16)
    out, _ = layer.impl.forward_mqa(q, cache, metadata, layer.layer)
    want, _ = vllm_layer.decoded(layer, q, cache, batch, causal=False)
    np.testing.assert_allclose(out.double().numpy(), want, atol=ERROR, rtol=ERROR)


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("new", [[1, 1, 1], [4, 4, 4], [4, 1, 3]], ids=str)
def test_context_parallel(speculative: Layer, new: list[int], interleave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that hold every other key (or 16 keys in turn): their results, merged by lse, are the whole. The tokens
    of a request share its keys."""
    layer, world = speculative, 2
    batches: list[int] = []
    attend = decode.op.mla_decode

    def counted(q: Any, kv_cache: Any, block_tables: Any, *others: Any, **options: Any) -> Any:
        batches.append(len(block_tables))
        return attend(q, kv_cache, block_tables, *others, **options)

    monkeypatch.setattr(decode.op, "mla_decode", counted)
    batch = layer.batch(new, [70, 5, 129])
    q = torch.randn(sum(new), HEADS, 576, dtype=torch.bfloat16)
    outs, lses = [], []
    for rank in range(world):

        def held(n: int, rank: int = rank) -> list[int]:
            return [j for j in range(n) if j // interleave % world == rank]

        local = torch.tensor([len(held(n)) for n in batch.lens], dtype=torch.int32)
        with vllm_layer.context_parallel(layer, world, rank, interleave):
            metadata = layer.metadata(batch, dcp_local_seq_lens=local)
            cache = vllm_layer.filled(layer, batch, held)
            out, lse = layer.impl.forward_mqa(q, cache, metadata, layer.layer)
        outs.append(out.float())
        lses.append(lse)
    out, lse = tsmla_bridge.merge_attention_states(outs, lses)
    want, want_lse = vllm_layer.decoded(layer, q, vllm_layer.filled(layer, batch), batch)
    np.testing.assert_allclose(out.double().numpy(), want, atol=2 * ERROR, rtol=2 * ERROR)
    np.testing.assert_allclose(lse.numpy(), want_lse, atol=1e-3)
    assert batches == [3] * world


def test_graphs_of_context_parallelism_have_padding(speculative: Layer) -> None:
    layer, batch = speculative, speculative.batch([4, 4], [70, 9])
    q, local = torch.randn(12, HEADS, 576, dtype=torch.bfloat16), torch.tensor([35, 5, 0], dtype=torch.int32)
    outs = []
    for padding in ({}, {"padding": (1, 4)}):
        requests, tokens = (3, 12) if padding else (2, 8)
        with vllm_layer.context_parallel(layer, 2, 0, 1):
            metadata = layer.metadata(batch, **padding, dcp_local_seq_lens=local[:requests])
            cache = vllm_layer.filled(layer, batch, lambda n: list(range(0, n, 2)))
            outs.append(layer.impl.forward_mqa(q[:tokens], cache, metadata, layer.layer)[0])
    torch.testing.assert_close(outs[1][:8], outs[0], atol=ERROR, rtol=ERROR)
    assert not outs[1][8:].any() and outs[0].any(dim=-1).all()


def test_context_parallel_keeps_drafts_in_the_decode_path(speculative: Layer) -> None:
    parallel = speculative.config.parallel_config
    parallel.decode_context_parallel_size = 2
    try:
        with set_current_vllm_config(speculative.config):
            assert speculative.make_builder().reorder_batch_threshold == decode.SHORT_EXTEND
    finally:
        parallel.decode_context_parallel_size = 1


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_query_in_two_tensors_is_not_copied(layer: Layer, heads_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    latent = torch.randn(3, HEADS, 512, dtype=torch.bfloat16)
    latent = latent.transpose(0, 1).contiguous().transpose(0, 1) if heads_first else latent
    wide = torch.randn(3, HEADS, 192, dtype=torch.bfloat16)
    batch = layer.batch([1, 1, 1], [70, 5, 129])
    cache, metadata = vllm_layer.filled(layer, batch), layer.metadata(batch)
    seen: list[Any] = []
    attend = decode.op.mla_decode
    monkeypatch.setattr(decode.op, "mla_decode", lambda q, *a, **k: (seen.append(q), attend(q, *a, **k))[1])
    out, _ = layer.impl.forward_mqa((latent, wide[..., 128:]), cache, metadata, layer.layer)
    ((first, second),) = seen
    assert first.data_ptr() == latent.data_ptr() and second.data_ptr() == wide[..., 128:].data_ptr()
    want, _ = vllm_layer.decoded(layer, torch.cat((latent, wide[..., 128:]), -1), cache, batch)
    np.testing.assert_allclose(out.double().numpy(), want, atol=ERROR, rtol=ERROR)


def test_batch_invariance_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert Layer().impl.batch_invariant and TsmlaMLABackend.supports_batch_invariance()


def test_kernels_are_compiled_before_the_first_request(speculative: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[Any] = []
    warmed: list[tuple[int, bool, bool]] = []

    def warm(spec: Any, index: int, *, split_q: bool, heads_first: bool = False) -> None:
        assert split_q  # the layer's query is in two tensors
        specs.append(spec)
        warmed.append((spec.max_q_len, spec.ragged, heads_first))

    monkeypatch.setattr(decode.op, "warm", warm)
    speculative.builder._compile(0)
    first = VERSION < (0, 30)
    several = [(4, False, first), (4, True, first), (16, True, first)]
    assert warmed == [(1, False, False), *([(1, False, True)] if first else []), *several]
    (spec, *_) = specs
    assert (spec.num_heads, spec.latent_dim, spec.rope_dim, spec.page_size) == (HEADS, 512, 64, 64)
    for new in ([1, 1], [4, 4], [4, 1], [9, 2]):
        asked = speculative.metadata(speculative.batch(new, [70, 40])).decode
        q_len, ragged = (asked.max_q_len, True) if asked.q_len is None else (asked.q_len, False)
        assert (q_len, ragged) in [(spec.max_q_len, spec.ragged) for spec in specs]


def test_kernels_of_context_parallelism(speculative: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[Any] = []
    monkeypatch.setattr(decode.op, "warm", lambda spec, index, split_q: specs.append(spec))
    with vllm_layer.context_parallel(speculative, 2, 0, 1):
        speculative.builder._compile(0)
    assert [(spec.max_q_len, spec.ragged, spec.visible_lens) for spec in specs] == [
        (1, False, False), (4, False, True), (4, True, True), (16, True, True)
    ]  # fmt: skip
    specs.clear()
    with vllm_layer.context_parallel(speculative, 2, 0, 1):
        monkeypatch.setattr(speculative.builder, "non_causal_multi_token_decode", True, raising=False)
        speculative.builder._compile(0)
    assert [(spec.max_q_len, spec.ragged, spec.visible_lens, spec.causal) for spec in specs] == [
        (1, False, False, False), (4, False, False, False), (4, True, False, False), (16, True, False, False),
        (4, False, True, True), (4, True, True, True), (16, True, True, True),
    ]  # fmt: skip


# ---- registration and refusals


def test_names() -> None:
    plugin.register()  # again
    assert AttentionBackendEnum.CUSTOM.get_class() is TsmlaMLABackend
    assert prefill_registry.MLAPrefillBackendEnum.CUSTOM.get_class() is TsmlaMLAPrefillBackend
    if VERSION >= (0, 33):
        assert AttentionBackendEnum["TSMLA"].get_class() is TsmlaMLABackend
        assert prefill_registry.MLAPrefillBackendEnum["TSMLA"].get_class() is TsmlaMLAPrefillBackend


def test_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_VLLM", "auto")
    plugin.register()
    try:
        assert AttentionBackendEnum.FLASH_ATTN_MLA.get_class() is TsmlaMLABackend
    finally:
        AttentionBackendEnum.FLASH_ATTN_MLA.clear_override()


def refusals(**changed: Any) -> list[str]:
    """vLLM's own validation of a configuration."""
    usual = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": HOPPER, "attn_type": "decoder", "use_batch_invariant": True, "use_non_causal": True,
        "use_dcp": True,
    }  # fmt: skip
    return TsmlaMLABackend.validate_configuration(**known(TsmlaMLABackend.validate_configuration, **usual | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"dtype": torch.float16}, {"block_size": 16},
        {"block_size": 256}, {"block_size": None}, {"head_size": 512}, {"head_size": 320},
        {"kv_cache_dtype": "fp8", "dtype": torch.float16},
    ],
    ids=str,
)  # fmt: skip
def test_served(changed: dict[str, Any]) -> None:
    assert refusals(**changed) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"use_sparse": True}, "CUSTOM with TSMLA_VLLM=sparse, is the sparse one"),
        ({"head_size": 192}, "the head size is 192; tsmla takes 576 (512 + 64)"),
        ({"block_size": 8}, "page size is 8; the sm_90 decode kernel takes 16, 32, 64 or 128"),
        ({"dtype": torch.float32}, "q.dtype is float32"),
        ({"dtype": torch.float16, "kv_cache_dtype": "bfloat16"}, "kv_cache.dtype is bfloat16"),
        ({"device_capability": SimpleNamespace(major=10, minor=0)}, "compute capability not supported"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"use_pcp": True, "use_dcp": False}, "PCP not supported"),
        ({"use_pcp": True}, "PCP not supported"),
    ],
    ids=str,
)
def test_refused(changed: dict[str, Any], said: str) -> None:
    assert said in "; ".join(refusals(**changed))


def test_prefill_refusals() -> None:
    def reasons(dtype: torch.dtype, nope: int, v: int, major: int = 9) -> list[str]:
        dimensions = MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=64, v_head_dim=v)
        capability = SimpleNamespace(major=major, minor=0)
        selector = SimpleNamespace(dtype=dtype, mla_dimensions=dimensions, is_r1_compatible=True)
        return TsmlaMLAPrefillBackend.validate_configuration(capability, selector)

    assert reasons(torch.bfloat16, 128, 128) == []
    assert reasons(torch.bfloat16, 192, 256) == []  # GLM-5
    assert "the head dims of k and v are 256 and 192" in "; ".join(reasons(torch.bfloat16, 192, 192))
    assert reasons(torch.bfloat16, 128, 128, major=10) != []


@pytest.mark.parametrize(
    "feature", [{"alibi_slopes": [0.5] * HEADS}, {"sliding_window": 128}, {"logits_soft_cap": 30.0}], ids=str
)
def test_the_layer_takes_no_attention_of_another_kind(layer: Layer, feature: dict[str, Any]) -> None:
    usual = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None}
    with (
        pytest.raises(NotImplementedError, match=f"{next(iter(feature))}: got a value; legal with tsmla's"),
        set_current_vllm_config(layer.config),
    ):
        TsmlaMLABackend.get_impl_cls()(
            HEADS, 576, 1.0, 1, *(usual | feature).values(), "decoder", None, q_lora_rank=None, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192, v_head_dim=V_DIM, kv_b_proj=layer.kv_b,
        )  # fmt: skip
