"""The sparse backend under vLLM's own layer, builder and implementation. Run by test_vllm.py in a process for each
version."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.mla import sparse_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.engines import vllm_layer
from tests.engines.vllm_layer import HEADS, NOPE, V_DIM, Batch, Layer, TsmlaMLABackend, known
from tests.oracles import sparse as oracle
from tsmla_bridge.engines import vllm as plugin
from tsmla_bridge.engines.context_parallel import held_keys
from tsmla_bridge.engines.vllm import sparse
from tsmla_bridge.engines.vllm.sparse import TsmlaMLASparseBackend
from tsmla_bridge.ops.sparse_plans import serving_pair
from tsmla_kernels.sm90.sparse.record import serving

import vllm._custom_ops as custom_ops  # isort: skip

TOPK = 128  # the smallest that vLLM's conversion takes
ERROR = 2**-7  # bf16: the kernels' results and the layer's products are rounded to it
FP8_ERROR = 0.06  # e4m3 has 3 bits of fraction
HOPPER = SimpleNamespace(major=9, minor=0)
VERSION = tuple(int(number) for number in vllm.__version__.split(".")[:2])


# ---- in place of vLLM's Triton kernels, streams and compiled operations: with their checks, dtypes and orders of slots


def _compacted(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of each row that are not -1, in front, and their numbers. Their order is left open: here they turn."""
    valid = slots.flip(1) >= 0
    order = torch.argsort((~valid).to(torch.int32), dim=1, stable=True)
    return slots.flip(1).gather(1, order).to(torch.int32), valid.sum(1, dtype=torch.int32)


def _convert(
    req_id: torch.Tensor, block_table: torch.Tensor, token_indices: torch.Tensor, *, BLOCK_SIZE: int,
    NUM_TOPK_TOKENS: int, return_valid_counts: bool, BLOCK_STRIDE_ROWS: int | None = None, out: Any = None,
    valid_counts_out: Any = None, idx_mapping: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    assert {req_id.dtype, block_table.dtype, token_indices.dtype} == {torch.int32}
    assert token_indices.shape == (len(req_id), NUM_TOPK_TOKENS) and not NUM_TOPK_TOKENS % 128
    assert return_valid_counts and idx_mapping is None
    page = token_indices.clamp(min=0) // BLOCK_SIZE
    pages = block_table[req_id.long()].gather(1, page.clamp(max=block_table.shape[1] - 1).long())
    slots = pages * (BLOCK_STRIDE_ROWS or BLOCK_SIZE) + token_indices % BLOCK_SIZE
    slots = torch.where((token_indices < 0) | (page >= block_table.shape[1]), -1, slots)
    slots, counts = _compacted(slots)
    if out is not None:
        slots, counts = out.copy_(slots), valid_counts_out.copy_(counts)
    return slots, counts


def _convert_of_rank(
    req_id: torch.Tensor, block_table: torch.Tensor, token_indices: torch.Tensor, *, dcp_size: int, dcp_rank: int,
    cp_kv_cache_interleave_size: int, **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    turn = token_indices // cp_kv_cache_interleave_size
    local = held_keys(token_indices, dcp_size, dcp_rank, cp_kv_cache_interleave_size)
    local = torch.where((token_indices >= 0) & (turn % dcp_size == dcp_rank), local, -1)
    assert not others["BLOCK_SIZE"] % cp_kv_cache_interleave_size
    return _convert(req_id, block_table, local.to(torch.int32), **others)


def _unpack(
    src_cache: torch.Tensor, dst: torch.Tensor, block_table: torch.Tensor, workspace_starts: torch.Tensor,
    batch_size: int, seq_starts: torch.Tensor,
) -> None:  # fmt: skip
    assert (src_cache.dtype, dst.dtype) == (torch.uint8, torch.bfloat16) and dst.is_contiguous()
    assert {block_table.dtype, workspace_starts.dtype, seq_starts.dtype} == {torch.int32}
    rows = torch.from_numpy(oracle.v32_values(src_cache.numpy())).to(dst.dtype)
    at = 0
    for request, (count, start) in enumerate(zip(workspace_starts.diff().tolist(), seq_starts.tolist(), strict=False)):
        for j in range(start, start + count):
            dst[at] = rows[block_table[request, j // rows.shape[1]], j % rows.shape[1]]
            at += 1


sparse_utils.triton_filter_and_convert_dcp_index = _convert_of_rank
custom_ops.cp_gather_and_upconvert_fp8_kv_cache = _unpack
if VERSION >= (0, 31):
    import vllm.v1.attention.ops.metadata as metadata_ops

    def _requests_of_tokens(starts: torch.Tensor, out: torch.Tensor, mapped: int, count: int) -> torch.Tensor:
        owner = torch.searchsorted(starts[1:], torch.arange(count), right=True)
        return out[:count].copy_(torch.where(torch.arange(count) < mapped, owner, 0))

    class _Launched:
        """The Triton kernel of the same map, which 0.31 launches itself."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda starts, out, requests, mapped, count, **options: _requests_of_tokens(
                starts, out, mapped, count
            )

    metadata_ops.compute_token_to_req_indices = _requests_of_tokens
    metadata_ops._token_request_mapping_kernel = _Launched()
if VERSION >= (0, 30):
    from vllm.v1.attention.backends.mla import index_group

    index_group._create_side_stream = index_group._create_event = lambda *arguments: None


# ---- the layer


class SparseLayer(Layer):
    backend = TsmlaMLASparseBackend
    model: Mapping[str, Any] = {"index_topk": TOPK, "index_n_heads": 4, "index_head_dim": 128}

    def arguments(self) -> dict[str, Any]:
        self.selected = torch.full((1024, TOPK), -1, dtype=torch.int32)
        indexer = SimpleNamespace(topk_indices_buffer=self.selected)
        return {"use_sparse": True, "indexer": indexer, "topk_indices_buffer": self.selected}

    def select(self, batch: Batch) -> list[np.ndarray]:
        """Positions for every token, as an indexer writes them: all that it sees, or TOPK of these."""
        positions, random = [], np.random.default_rng(0)
        self.selected.fill_(-1)
        for n, new in zip(batch.lens, batch.new, strict=True):
            for seen in range(n - new + 1, n + 1):
                mine = np.arange(seen) if seen <= TOPK else np.sort(random.permutation(seen)[:TOPK])
                self.selected[len(positions), : len(mine)] = torch.from_numpy(mine)
                positions.append(mine)
        return positions

    def want_of(self, batch: Batch, positions: list[np.ndarray]) -> np.ndarray:
        """The layer's output in float64, each token over its own positions."""
        weight = self.kv_b.weight.double().view(HEADS, NOPE + V_DIM, self.latent).numpy()
        q = batch.q.double().numpy()
        absorbed = np.concatenate([np.einsum("thp,hpl->thl", q[..., :NOPE], weight[:, :NOPE]), q[..., NOPE:]], -1)
        owner = np.repeat(np.arange(len(batch.lens)), batch.new)
        keys = [np.concatenate(pair, -1) for pair in zip(*([x.double().numpy() for x in of]
                for of in (batch.latents, batch.ropes)), strict=True)]  # fmt: skip
        rows = [keys[b][mine] for b, mine in zip(owner, positions, strict=True)]
        out, _ = oracle.quick_sparse_mla(absorbed, rows, scale=self.scale, latent_dim=self.latent)
        return np.einsum("thl,hvl->thv", out, weight[:, NOPE:])

    def sparse_error(self, batch: Batch) -> float:
        want = self.want_of(batch, self.select(batch))
        return float(np.abs(self.run(batch)[0].double().numpy() - want).max() / np.abs(want).max())


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    vllm_layer.start()


@pytest.fixture(scope="module")
def layer() -> SparseLayer:
    return SparseLayer()


@pytest.mark.parametrize(
    ("new", "lens"),
    [
        pytest.param([1, 1, 3], [300, 5, 200], id="decodes and drafts"),
        pytest.param([1, 40], [70, 40], id="a short prompt, by dense prefill"),
        pytest.param([1, 40], [150, 100], id="a short prompt with context"),
        pytest.param([1, 40, 20], [70, 40, 300], id="a long prompt"),
        pytest.param([1, 2, 3, 1], [300, 66, 131, 65], id="prompts with 1 to 3 tokens that are not cached"),
    ],
)
def test_batches(layer: SparseLayer, new: list[int], lens: list[int]) -> None:
    assert layer.sparse_error(layer.batch(new, lens)) < ERROR


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"cache_dtype": "fp8_ds_mla"}, FP8_ERROR),
        ({"cache_dtype": "fp8"}, FP8_ERROR),
        ({"dtype": "float16"}, ERROR),
        ({"cache_dtype": "fp8", "dtype": "float16"}, FP8_ERROR),
        ({"rope": 0}, ERROR),
    ],
    ids=str,
)
def test_caches_and_sizes(options: dict[str, Any], error: float) -> None:
    if options.get("rope") == 0 and VERSION < (0, 30):
        pytest.skip("this version's layer takes no rope width of 0")
    layer = SparseLayer(**options)
    for new, lens in (([1, 1, 3], [300, 5, 200]), ([1, 30], [150, 100])):
        assert layer.sparse_error(layer.batch(new, lens)) < error


def latent_queries(layer: SparseLayer, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(count, HEADS, layer.latent + layer.rope, dtype=torch.bfloat16)
    return q[..., : layer.latent], q[..., layer.latent :]


def test_packed_rows_are_read_as_they_are_written() -> None:
    """Against float64 over what the cache holds, so that only the kernel's own rounding is left."""
    layer = SparseLayer(cache_dtype="fp8_ds_mla")
    batch = layer.batch([1, 2], [300, 140])
    positions, cache, metadata = layer.select(batch), vllm_layer.filled(layer, batch), layer.metadata(batch)
    q = latent_queries(layer, 3)
    out, lse = layer.impl.forward_mqa(q, cache, metadata, layer.layer)
    values, tables = oracle.v32_values(cache.numpy()), layer.tables(batch).numpy()
    rows = [values[tables[b, mine // 64], mine % 64] for b, mine in zip((0, 1, 1), positions, strict=True)]
    want, _ = oracle.quick_sparse_mla(torch.cat(q, -1).double().numpy(), rows, scale=layer.scale, latent_dim=512)
    np.testing.assert_allclose(out.double().numpy(), want, atol=ERROR, rtol=ERROR)
    assert lse is None


def test_pages_of_several_layers_in_one_pool(layer: SparseLayer) -> None:
    if VERSION < (0, 30):
        pytest.skip("this version's caches have no gaps")
    batch = layer.batch([1, 1], [300, 140])
    layer.select(batch)
    cache, metadata, q = vllm_layer.filled(layer, batch), layer.metadata(batch), latent_queries(layer, 2)
    want, _ = layer.impl.forward_mqa(q, cache, metadata, layer.layer)
    pool = torch.full((len(cache), 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
    pool[:, 1] = cache
    got, _ = layer.impl.forward_mqa(q, pool[:, 1], metadata, layer.layer)
    assert torch.equal(got, want)


def test_pages_must_lie_whole_rows_apart() -> None:
    with pytest.raises(ValueError, match="and pages whole rows of 8 apart"):
        sparse._rows(torch.zeros(3 * 70).as_strided((3, 8, 8), (70, 8, 1)))


def test_pages_apart_need_a_version_that_counts_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sparse_utils, "flat_kv_row_view", raising=False)
    rows, step = sparse._rows(torch.zeros(3, 8, 8))
    assert (len(rows), step) == (24, 8)
    with pytest.raises(ValueError, match="got pages 16 rows apart; legal in this version of vLLM: 8, a page's rows"):
        sparse._rows(torch.zeros(3, 16, 8)[:, :8])


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("new", [[1, 1, 1], [4, 1, 3]], ids=str)
def test_context_parallel(layer: SparseLayer, new: list[int], interleave: int) -> None:
    """Two ranks that hold every other key (or 16 keys in turn): their results, merged by lse, are the whole."""
    world = 2
    batch = layer.batch(new, [300, 5, 129])
    layer.select(batch)
    q = latent_queries(layer, sum(new))
    want, _ = layer.impl.forward_mqa(q, vllm_layer.filled(layer, batch), layer.metadata(batch), layer.layer)
    outs, lses = [], []
    for rank in range(world):

        def held(n: int, rank: int = rank) -> list[int]:
            return [j for j in range(n) if j // interleave % world == rank]

        with vllm_layer.context_parallel(layer, world, rank, interleave):
            metadata = layer.metadata(batch)
            cache = vllm_layer.filled(layer, batch, held)
            out, lse = layer.impl.forward_mqa(torch.cat(q, -1), cache, metadata, layer.layer)
        outs.append(out)
        lses.append(lse)
    weights = torch.stack(lses).softmax(0)[..., None].nan_to_num()
    got = (torch.stack(outs).float() * weights).sum(0)
    np.testing.assert_allclose(got.numpy(), want.float().numpy(), atol=2 * ERROR, rtol=2 * ERROR)


def test_layers_that_share_an_indexer_convert_once(layer: SparseLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    if VERSION < (0, 30):
        pytest.skip("this version has no groups of layers")
    batch = layer.batch([1, 1], [300, 140])
    layer.select(batch)
    cache, metadata, q = vllm_layer.filled(layer, batch), layer.metadata(batch), latent_queries(layer, 2)
    want, _ = layer.impl.forward_mqa(q, cache, metadata, layer.layer)
    seen: list[Any] = []

    def once(selected: torch.Tensor, metadata: Any, *, block_stride_rows: int, return_valid_counts: bool) -> Any:
        seen.append(block_stride_rows)
        return _convert(
            metadata.req_id_per_token[: len(selected)], metadata.block_table, selected, BLOCK_SIZE=64,
            BLOCK_STRIDE_ROWS=block_stride_rows, NUM_TOPK_TOKENS=TOPK, return_valid_counts=return_valid_counts,
        )  # fmt: skip

    monkeypatch.setattr(layer.impl.index_group, "num_layers", 2)
    monkeypatch.setattr(layer.impl, "_convert_logical_to_physical_topk", once)
    got, _ = layer.impl.forward_mqa(q, cache, metadata, layer.layer)
    assert torch.equal(got, want) and seen == [64]


def test_batch_invariance_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer = SparseLayer()
    batch = layer.batch([1], [70])
    layer.select(batch)
    seen: list[bool] = []
    attend = sparse.op.sparse_mla
    monkeypatch.setattr(
        sparse.op, "sparse_mla", lambda *a, **k: (seen.append(k["batch_invariant"]), attend(*a, **k))[1]
    )
    assert layer.sparse_error(batch) < ERROR and seen == [True]


def test_kernels_are_compiled_before_the_first_request(layer: SparseLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[Any] = []
    monkeypatch.setattr(sparse.op, "warm", lambda spec, index, **given: specs.append((spec, given)))
    layer.builder._compile(0)
    kinds = list(itertools.product(sparse.op.WARM_TOKENS, (1, sparse.SEVERAL)))
    assert [(spec.num_tokens, spec.tokens_per_request, spec.num_selected, spec.num_heads) for spec, _ in specs] == [
        (*kind, TOPK, HEADS) for kind in kinds
    ]
    heads_first = VERSION < (0, 30)
    for spec, given in specs:
        assert given == {"lengths": True, "split_q": True, "heads_first": heads_first and spec.num_tokens > 1}
    for heads, rows, topk in itertools.product((HEADS, 16, 64, 128), ("auto", "fp8_ds_mla"), (TOPK, 2048)):

        def served(tokens: int, per_request: int, heads: int = heads, rows: str = rows, topk: int = topk) -> Any:
            spec = sparse.describe(
                576, torch.bfloat16, rows, num_heads=heads, num_tokens=tokens, num_selected=topk,
                tokens_per_request=per_request,
            )  # fmt: skip
            given = {"lengths": True, "sinks": False}
            return serving_pair(spec, **given, heads_first=heads_first) or serving(spec, **given)

        steps = itertools.product((*range(1, 1000), 1024, 5000), (1, sparse.SEVERAL))
        assert {served(*step) for step in steps} == {served(*kind) for kind in kinds}


def test_queries_in_two_tensors_are_joined_where_no_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, tokens, heads, reads in (
        ("auto", 64, 128, True), ("auto", 4096, 64, True), ("auto", 1, 128, False), ("auto", 64, 16, False),
        ("fp8_ds_mla", 64, 128, False), ("fp8", 64, 128, False),
    ):  # fmt: skip
        layer = SparseLayer(cache_dtype=rows)
        assert layer.impl._reads_pair(tokens, heads, 1) is reads
    layer = SparseLayer()
    batch = layer.batch([1, 3], [300, 140])
    layer.select(batch)
    cache, metadata, (latent, rope) = vllm_layer.filled(layer, batch), layer.metadata(batch), latent_queries(layer, 4)
    given: list[Any] = []
    attend = sparse.op.sparse_mla
    monkeypatch.setattr(sparse.op, "sparse_mla", lambda q, *a, **k: (given.append(q), attend(q, *a, **k))[1])
    results = []
    for reads in (False, True):
        monkeypatch.setattr(layer.impl, "_reads_pair", lambda *arguments, reads=reads: reads)
        for q in (latent, latent.movedim(1, 0).contiguous().movedim(0, 1)):
            results.append(layer.impl.forward_mqa((q, rope), cache, metadata, layer.layer)[0])
    assert all(torch.equal(each, results[0]) for each in results)
    assert [isinstance(q, tuple) for q in given] == [False, False, True, True]
    assert [q[0].is_contiguous() for q in given[2:]] == [True, False]  # [H, T, L] is read as it is


class Operations(TorchDispatchMode):
    """Keeps the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


def test_vllms_operations_are_all_of_a_decode_steps_metadata(
    layer: SparseLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At few requests a step waits for the host, and what it does there is a step's time."""

    def operations_of(build: Any) -> list[str]:
        given: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(layer.builder, "build", lambda *arguments: given.extend(arguments))
            layer.metadata(layer.batch([1, 1], [70, 300]))
        with Operations() as operations:
            build(layer.builder, *given)
        return operations.names

    own, vllms = (kind.build for kind in type(layer.builder).__mro__[:2])
    assert operations_of(own) == operations_of(vllms) != []


# ---- registration and refusals


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    if VERSION >= (0, 33):
        assert AttentionBackendEnum["TSMLA_SPARSE"].get_class() is TsmlaMLASparseBackend
    monkeypatch.setenv("TSMLA_VLLM", "sparse")
    AttentionBackendEnum.CUSTOM.clear_override()
    try:
        plugin.register()
        assert AttentionBackendEnum.CUSTOM.get_class() is TsmlaMLASparseBackend
    finally:
        monkeypatch.delenv("TSMLA_VLLM")
        AttentionBackendEnum.CUSTOM.clear_override()
        plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is TsmlaMLABackend


def refusals(**changed: Any) -> list[str]:
    """vLLM's own validation of a configuration."""
    usual = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": True, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": HOPPER, "attn_type": "decoder", "use_batch_invariant": True, "use_dcp": True,
    }  # fmt: skip
    validate = TsmlaMLASparseBackend.validate_configuration
    return validate(**known(validate, **usual | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"kv_cache_dtype": "fp8_ds_mla"}, {"kv_cache_dtype": "fp8"}, {"dtype": torch.float16}, {"block_size": 128},
        {"head_size": 512}, {"block_size": None}, {"dtype": torch.float16, "kv_cache_dtype": "fp8"},
    ],
    ids=str,
)  # fmt: skip
def test_served(changed: dict[str, Any]) -> None:
    assert refusals(**changed) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"use_sparse": False}, "this is tsmla's sparse backend"),
        ({"head_size": 320}, "the head size is 320; tsmla's sparse attention takes 576"),
        ({"head_size": 512, "kv_cache_dtype": "fp8_ds_mla"}, "rows of fp8_ds_mla hold 576"),
        ({"dtype": torch.float32}, "q.dtype is float32"),
        ({"dtype": torch.float16, "kv_cache_dtype": "fp8_ds_mla"}, "are read as bfloat16, and vLLM writes the bits"),
        ({"device_capability": SimpleNamespace(major=10, minor=0)}, "compute capability not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"use_pcp": True, "use_dcp": False}, "PCP not supported"),
        ({"use_pcp": True}, "PCP not supported"),
    ],
    ids=str,
)
def test_refused(changed: dict[str, Any], said: str) -> None:
    assert said in "; ".join(refusals(**changed))


def test_a_cache_on_the_host_is_refused(layer: SparseLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    """HiSparse, which vLLM has from 0.30 on."""
    monkeypatch.setattr(layer.config.attention_config, "hisparse_config", SimpleNamespace(), raising=False)
    with set_current_vllm_config(layer.config):
        assert "HiSparse keeps the cache on the host" in "; ".join(refusals())


@pytest.mark.parametrize("heads", [64, 128])
def test_many_heads_are_served(layer: SparseLayer, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layer.config.model_config
    monkeypatch.setattr(type(model), "get_num_attention_heads", lambda *arguments: heads)
    with set_current_vllm_config(layer.config):
        for kv_cache_dtype in ("auto", "fp8_ds_mla"):
            assert refusals(kv_cache_dtype=kv_cache_dtype) == []
