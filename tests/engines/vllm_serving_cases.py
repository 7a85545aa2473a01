"""What vLLM may do while it serves, and what its later versions may assume. Run by test_vllm.py in a process for each
version."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
import vllm.model_executor.layers.attention.mla_attention as mla_attention
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.engines import vllm_layer
from tests.engines.vllm_cases import ERROR, FP8_ERROR, VERSION
from tests.engines.vllm_layer import HEADS, Layer, TsmlaMLABackend
from tests.engines.vllm_sparse_cases import SparseLayer, TsmlaMLASparseBackend
from tsmla_bridge.engines.vllm import decode, sparse
from tsmla_kernels.sm90.decode.config import DecodeConfig, decode_config

BACKENDS = (TsmlaMLABackend, TsmlaMLASparseBackend)


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    vllm_layer.start()


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


# ---- what is decided

# (dense, sparse): what vLLM's classes answer through ours. A name that a later version adds is to be decided here.
ANSWERS: dict[str, tuple[Any, Any]] = {
    "forward_includes_kv_cache_update": (True, True),  # of backends without MLA
    "get_name": ("CUSTOM", "CUSTOM"),
    "get_supported_head_sizes": ([576, 512, 320], [576, 512]),
    "indexes_kv_by_block_stride": (False, False),
    "is_mla": (True, True),
    "is_sparse": (False, True),
    "is_ssm": (False, False),
    "supported_kv_cache_layouts": (None, None),
    "get_required_kv_cache_layout": (None, None),
    "supports_alibi_sqrt": (False, False),
    "supports_batch_invariance": (True, True),
    "supports_dcp": (True, True),
    "supports_device_cpu_query_lens_mismatch": (False, False),
    "supports_kv_cache_update_bypass": (False, False),
    "supports_kv_connector": (True, True),
    "supports_mm_prefix": (False, False),
    "supports_non_causal": (True, False),
    "supports_non_causal_dcp": (True, False),
    "supports_pcp": (False, False),
    "supports_per_head_quant_scales": (False, False),
    "supports_rswa": (False, False),
    "supports_sink": (False, False),
    "supports_sliding_window": (False, False),
}
IMPL_ANSWERS: dict[str, tuple[Any, Any]] = {
    "can_return_lse_for_decode": (True, True),
    "group_conversion_decode_only": (None, False),
    "hisparse_cache": (None, None),
    "lse_base_on_e": (True, True),
    "need_to_return_lse_for_decode": (False, False),
    "supports_dcp": (True, True),
    "supports_dense_mha_prefill": (True, True),
    "supports_mtp_with_cp_non_trivial_interleave_size": (True, True),
    "supports_pcp": (False, False),
    "supports_quant_query_input": (False, False),  # an instance may say otherwise
}
BUILDER_ANSWERS: dict[str, tuple[Any, Any]] = {
    "hisparse_supports_multi_token_decode": (None, False),
    "require_uniform_decodes": (None, False),
    "requires_block_table_width": (False, False),
    "supports_draft_decode_metadata_update": (False, False),
    "supports_non_causal_multi_token_dcp": (True, None),
    "supports_non_causal_multi_token_decode": (True, None),
    "supports_update_block_table": (False, False),
}
# Functions with arguments, what instances have, and what other tests ask.
OTHERS = {
    "backend": "customize_spec full_cls_name get_builder_cls get_impl_cls get_kv_cache_block_dim get_kv_cache_shape"
    " get_kv_cache_stride_order get_preferred_block_size get_supported_kernel_block_sizes supported_dtypes"
    " supported_kv_cache_dtypes supports_attn_type supports_block_size supports_combination"
    " supports_compute_capability supports_dtype supports_head_size supports_kv_cache_dtype validate_configuration",
    "impl": "dcp_rank dcp_world_size do_kv_cache_update forward_mha forward_mqa fused_output_quant_supported"
    " get_impl_variants head_size init_topk_indices_buffer is_sparse masked_mha_workspace_fits num_heads pcp_rank"
    " pcp_world_size prepare_for_batch process_weights_after_loading record_logical_topk_ready reserve_workspace scale"
    " topk_indices_buffer total_cp_rank total_cp_world_size",
    "builder": "build build_for_cudagraph_capture build_for_drafting determine_chunked_prefill_workspace_size"
    " determine_prefill_query_data_type get_cudagraph_support get_varlen_cudagraph_max_query_len kv_cache_spec"
    " metadata_cls query_len_support reorder_batch_threshold set_kernel_block_size update_block_table"
    " update_draft_decode_metadata use_cascade_attention",
}
CLASSES: dict[str, tuple[tuple[type, ...], dict[str, tuple[Any, Any]]]] = {
    "backend": (BACKENDS, ANSWERS),
    "impl": (tuple(backend.get_impl_cls() for backend in BACKENDS), IMPL_ANSWERS),
    "builder": (tuple(backend.get_builder_cls() for backend in BACKENDS), BUILDER_ANSWERS),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_every_answer_that_vllm_has_for_its_backends_is_decided(kind: str) -> None:
    ours, answers = CLASSES[kind]
    theirs = {
        name
        for cls in ours
        for base in cls.__mro__
        if base.__module__.startswith("vllm")
        for name in [*vars(base), *vars(base).get("__annotations__", {})]
        if not name.startswith("_")
    }
    assert theirs <= answers.keys() | set(OTHERS[kind].split())
    for name in theirs & answers.keys():
        for cls, want in zip(ours, answers[name], strict=True):
            if hasattr(cls, name):
                answer = getattr(cls, name)
                assert (answer() if callable(answer) else answer) == want, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_adaptive_verification_is_refused(backend: Any) -> None:
    if VERSION < (0, 30):
        pytest.skip("this version has none")
    usual = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": backend is TsmlaMLASparseBackend, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": SimpleNamespace(major=9, minor=0),
        "attn_type": "decoder",
    }  # fmt: skip
    assert backend.validate_configuration(**usual) == []
    (said,) = backend.validate_configuration(**usual, use_adaptive_verification=True)
    assert "adaptive verification" in said
    (said,) = backend.validate_configuration(**usual, use_something_new=True)
    assert "tsmla does not fit this version of vLLM: TypeError: " in said and "use_something_new" in said


# ---- weights that are loaded anew

OPTIONS = [
    pytest.param(Layer, {"cache_dtype": "fp8"}, "1", id="fp8"),
    pytest.param(Layer, {"cache_dtype": "fp8"}, "0", id="queries of 16 bits"),
    pytest.param(SparseLayer, {"cache_dtype": "fp8"}, "1", id="sparse"),
]


@pytest.mark.parametrize(("make", "options", "fp8_queries"), OPTIONS)
def test_a_graph_sees_scales_that_were_loaded_after_its_capture(
    make: type[Layer], options: dict[str, Any], fp8_queries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay has the operands of the capture, the same tensors, and does what was captured on the device again. vLLM
    fills its tensors anew, in place; its numbers on the host are not part of a graph."""
    monkeypatch.setenv("TSMLA_VLLM_FP8_QUERIES", fp8_queries)
    layer = make(**options)
    op, name = (sparse.op, "sparse_mla") if make is SparseLayer else (decode.op, "mla_decode")
    attend = getattr(op, name)
    captured: dict[str, Any] = {}
    replays = False

    def call(*arguments: Any, **given: Any) -> Any:
        scales = {key: value for key, value in given.items() if key.endswith("scale")}
        assert not [key for key, value in scales.items() if isinstance(value, float)]
        if not replays:
            captured.update(scales)
        return attend(*arguments, **(given | captured))

    def error(new: list[int], lens: list[int]) -> float:
        batch = layer.batch(new, lens)
        return layer.sparse_error(batch) if isinstance(layer, SparseLayer) else layer.error(batch)

    monkeypatch.setattr(op, name, call)
    assert error([1, 1, 1], [70, 33, 100]) < FP8_ERROR
    replays = True
    for q_scale, k_scale in ((0.5, 0.25), (2.0, 0.125)):
        layer.layer._q_scale.fill_(q_scale)
        layer.layer._k_scale.data.copy_(torch.tensor(k_scale))
        assert error([1, 1, 1], [70, 33, 100]) < FP8_ERROR


def test_a_prompt_reads_the_loaded_scales_too() -> None:
    layer = Layer(cache_dtype="fp8")
    layer.layer._k_scale.fill_(0.25)
    assert layer.error(layer.batch([20, 1], [170, 33])) < FP8_ERROR


# ---- batch invariance


def kernel_of(layer: Layer, new: list[int], lens: list[int], **padded: Any) -> tuple[DecodeConfig, int]:
    """The kernel that the first request's decode runs in this batch, and how many requests take that path."""
    metadata = layer.metadata(layer.batch(new, lens), **padded)
    step = metadata.decode
    q_len, ragged = (step.max_q_len, True) if step.q_len is None else (step.q_len, False)
    spec = decode.describe(
        576, 64, torch.bfloat16, "auto", max_q_len=q_len, total_q_len=q_len, ragged=ragged, num_heads=16,
        batch_invariant=True,
    )  # fmt: skip
    return decode_config(spec, split_q=True), metadata.num_decodes


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_one_kernel_serves_a_request_whatever_else_is_in_the_batch(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, most = Layer(drafts=drafts), 1 + drafts
    batches = [[most], [most, most], [most, 1], [most, most + 1], [most, 5], [most, 9], [most, 16], [most, 40]]
    batches += [[1], [1, most], [1, 5]] if drafts else []
    kernels = {kernel_of(layer, new, [3000 // len(new), 900][: len(new)])[0] for new in batches}
    kernels.add(kernel_of(layer, [most, most], [70, 9], padding=(1, most))[0])
    assert len(kernels) == 1
    assert kernel_of(layer, [most, 5], [900, 70])[1] == 1  # a prompt's last tokens are expanded, as its others are
    specs: list[Any] = []
    monkeypatch.setattr(decode.op, "warm", lambda spec, index, split_q: specs.append(spec))
    layer.builder._compile(0)
    assert {(spec.max_q_len, spec.ragged) for spec in specs} == {(kernels.pop().max_q_len, drafts > 0)}
    assert layer.error(layer.batch([most, 1, 5, 40], [70, 33, 66, 40])) < ERROR


@pytest.mark.parametrize(("padding", "requests"), [((0, 0), 2), ((2, 2), 4), ((2, 1), 3), ((2, 0), 2)], ids=str)
def test_padding_with_rows_or_without_has_no_kernel_of_its_own(padding: tuple[int, int], requests: int) -> None:
    layer = Layer()
    batch = layer.batch([1, 1], [70, 129])
    metadata = layer.metadata(batch, padding=padding)
    step = metadata.decode
    assert step.q_len == 1
    assert [len(x) for x in (step.block_table, step.seq_lens, step.query_start_loc[1:])] == [requests] * 3
    cache, q = vllm_layer.filled(layer, batch), torch.randn(2, HEADS, 576, dtype=torch.bfloat16)
    want, _ = layer.impl.forward_mqa(q, cache, layer.metadata(batch), layer.layer)
    rows = torch.cat((q, torch.zeros(padding[1], HEADS, 576, dtype=torch.bfloat16)))
    got, _ = layer.impl.forward_mqa(rows, cache, metadata, layer.layer)
    assert torch.equal(got[:2], want) and not got[2:].any()


def test_queries_in_a_precision_that_the_layer_does_not_hand_over() -> None:
    layer = Layer(cache_dtype="fp8")
    batch = layer.batch([1], [70])
    q, cache = torch.randn(1, HEADS, 576, dtype=torch.bfloat16), vllm_layer.filled(layer, batch)
    with pytest.raises(ValueError, match=r"q: got torch.bfloat16; legal: torch.float8_e4m3fn"):
        layer.impl.forward_mqa(q, cache, layer.metadata(batch), layer.layer)


@pytest.mark.usefixtures("invariant")
def test_a_query_with_its_heads_in_front_has_no_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    latent = torch.randn(HEADS, 2, 512, dtype=torch.bfloat16).transpose(0, 1)
    batch = layer.batch([1, 1], [70, 5])
    seen: list[Any] = []
    attend = decode.op.mla_decode
    monkeypatch.setattr(decode.op, "mla_decode", lambda q, *a, **k: (seen.append(q), attend(q, *a, **k))[1])
    rope = torch.randn(2, HEADS, 192, dtype=torch.bfloat16)[..., 128:]
    layer.impl.forward_mqa((latent, rope), vllm_layer.filled(layer, batch), layer.metadata(batch), layer.layer)
    assert seen[0][0].is_contiguous()


@pytest.mark.usefixtures("invariant")
def test_a_short_prompt_is_attended_as_beside_a_long_one() -> None:
    """vLLM expands the prompts of a batch if all are short."""
    layer = SparseLayer()
    for new, lens in (([1, 40], [70, 40]), ([1, 40, 20], [70, 40, 300])):
        batch = layer.batch(new, lens)
        assert layer.metadata(batch).prefill is None
        assert layer.sparse_error(batch) < ERROR


# ---- kernels of layers that are not as the model's configuration says


@pytest.fixture
def speculative() -> Layer:
    return Layer(drafts=3)


def warmed(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    specs: list[Any] = []
    op = sparse.op if isinstance(layer, SparseLayer) else decode.op
    monkeypatch.setattr(op, "warm", lambda spec, index, **options: specs.append(spec))
    layer.builder._compile(0)
    return specs


@pytest.mark.parametrize("make", [Layer, SparseLayer])
def test_kernels_of_layers_that_skip_the_caches_dtype(make: type[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = vllm_layer.configuration

    def skipping(*arguments: Any, **model: Any) -> Any:
        config = configuration(*arguments, **model)
        config.cache_config.kv_cache_dtype_skip_layers = ["0"]
        return config

    monkeypatch.setattr(vllm_layer, "configuration", skipping)
    layer = make(cache_dtype="fp8")
    assert layer.layer.kv_cache_dtype == "auto"
    if make is SparseLayer:
        assert {spec.cache.dtype for spec in warmed(layer, monkeypatch)} == {"bfloat16"}
    else:
        assert {(spec.q_dtype, spec.kv_dtype) for spec in warmed(layer, monkeypatch)} == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize("make", [Layer, SparseLayer])
def test_kernels_of_a_draft_with_heads_and_a_dtype_of_its_own(
    make: type[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make()
    layer.impl.num_heads, layer.impl.dtype = 32, torch.float16
    specs = warmed(layer, monkeypatch)
    assert {spec.num_heads for spec in specs} == {32} and {spec.q_dtype for spec in specs} == {"float16"}


def test_kernels_of_blocks_that_see_all_keys_and_of_short_extends_beside_them(
    speculative: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if VERSION < (0, 30):
        pytest.skip("this version has no such metadata")
    speculative.layer.non_causal_multi_token_decode = True
    with set_current_vllm_config(speculative.config):
        speculative.builder = speculative.make_builder()
    known = {(spec.max_q_len, spec.ragged, spec.causal) for spec in warmed(speculative, monkeypatch)}
    for new, causal in (([3, 3], False), ([4, 4], False), ([4, 4], True), ([2, 9], True), ([1, 4], True)):
        step = speculative.metadata(speculative.batch(new, [70, 40]), causal=causal).decode
        asked = (step.max_q_len, True, causal) if step.q_len is None else (step.q_len, False, causal)
        assert asked in known


# ---- memory


def test_a_table_of_shared_blocks_is_multiplied_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    batch = layer.batch([1, 1], [70, 129])
    cache, metadata = vllm_layer.filled(layer, batch), layer.metadata(batch)
    pool = torch.full((len(cache), 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
    pool[:, 1] = pool[:, 2] = cache
    q = torch.randn(2, HEADS, 576, dtype=torch.bfloat16)
    seen: list[Any] = []
    attend = decode.op.mla_decode

    def record(q: Any, kv_cache: Any, block_tables: Any, *others: Any, **options: Any) -> Any:
        seen.append(block_tables)
        assert kv_cache.is_contiguous()
        return attend(q, kv_cache, block_tables, *others, **options)

    want, _ = layer.impl.forward_mqa(q, cache, metadata, layer.layer)
    monkeypatch.setattr(decode.op, "mla_decode", record)
    for of in (1, 2):
        got, _ = layer.impl.forward_mqa(q, pool[:, of], metadata, layer.layer)
        assert torch.equal(got, want)
    assert seen[0] is seen[1] and torch.equal(seen[0], 3 * metadata.decode.block_table)


def test_larger_blocks_are_cut_into_the_best_pages() -> None:
    if VERSION < (0, 32):
        pytest.skip("this version's choice of pages doesn't say of which block")
    from vllm.v1.worker.utils import select_common_block_size

    spec = Layer().layer.get_kv_cache_spec(Layer().config)
    for size, page in ((64, 64), (128, 128), (32, 32), (256, 64), (192, 64), (384, 64), (48, 16), (96, 32)):
        of = dataclasses.replace(spec, block_size=size)
        assert select_common_block_size(size, [TsmlaMLABackend], [of]) == page


# ---- versions of vLLM whose classes have changed


@pytest.fixture
def unloaded() -> Iterator[None]:
    """As in a process that has not imported the backend yet."""
    package, name = decode.__name__.rsplit(".", 1)
    before = sys.modules.pop(decode.__name__)
    yield
    sys.modules[decode.__name__] = before
    setattr(sys.modules[package], name, before)


@pytest.mark.usefixtures("unloaded")
def test_a_field_with_a_default_in_vllms_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Changed(mla_attention.MLACommonDecodeMetadata):
        max_query_len: int = 0

    monkeypatch.setattr(mla_attention, "MLACommonDecodeMetadata", Changed)
    assert importlib.import_module(decode.__name__) is not decode


@pytest.mark.usefixtures("unloaded")
def test_other_changes_are_import_errors_to_vllms_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_attention, "QueryLenSupport", SimpleNamespace())
    with pytest.raises(ImportError, match=r"decode does not fit this version of vLLM: AttributeError: .*VARLEN"):
        AttentionBackendEnum.CUSTOM.get_class()


def test_names_of_backends_that_are_none() -> None:
    from tsmla_bridge.engines.vllm import backends

    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        _ = backends.Other


# ---- DeepSeek-V4


@pytest.mark.parametrize("model", ["deepseek_v4", "deepseek_v41"])
@pytest.mark.parametrize("name", ["CUSTOM", "TSMLA", "TSMLA_SPARSE"])
def test_v4_runs_vllms_own_attention_whatever_is_named(model: str, name: str) -> None:
    """The guide says so. vLLM's function is taken out of its module, which can't be imported without a GPU."""
    path = Path(vllm.__file__).parent / "models" / model / "nvidia" / "model.py"
    if not path.exists() or "_select_dsv4_attn_cls" not in (source := path.read_text()):
        pytest.skip("this version has no such model")
    if name not in AttentionBackendEnum.__members__:
        pytest.skip("this version has one name for plug-ins")
    found = next(
        node for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "_select_dsv4_attn_cls"
    )  # fmt: skip
    classes = {
        node.id: type(node.id, (), {"is_available_for": classmethod(lambda cls, config: False)})
        for node in ast.walk(found)
        if isinstance(node, ast.Name) and node.id.startswith("DeepseekV4")
    }
    platform = SimpleNamespace(get_device_capability=lambda: SimpleNamespace(major=9, minor=0))
    for argument in found.args.args:
        argument.annotation = None
    found.returns = None
    names: dict[str, Any] = {"AttentionBackendEnum": AttentionBackendEnum, "current_platform": platform, **classes}
    exec(compile(ast.Module([found], []), str(path), "exec"), names)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=AttentionBackendEnum[name]),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1),
    )
    assert names["_select_dsv4_attn_cls"](config).__name__ == "DeepseekV4FlashMLAAttention"
