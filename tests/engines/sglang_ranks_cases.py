"""The backend in SGLang's decode context parallelism, several ranks, their parts merged by SGLang's own code. Run by
test_sglang.py in a process of its own."""

from __future__ import annotations

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
    SPARE,
    VERIFY,
    Model,
    Ranks,
    settings,
)
from tests.engines.sglang_ranks import Cluster
from tsmla_bridge.engines import sglang as plugin
from tsmla_bridge.engines.sglang import backend
from tsmla_bridge.ops import mla_decode, mla_prefill

BF16 = 2**-7
FP8 = torch.float8_e4m3fn
# Of 2 and 3 ranks, some lengths leave ranks without keys, and most leave them different numbers. SGLang's other merge
# (ag_rs) takes powers of 2 alone: its kernel has a range of as many elements as there are ranks.
CLUSTERS = [(2, "a2a"), (2, "ag_rs"), (3, "a2a")]
LENS = [70, 1, 129, 2, 385]


def queries(count: int, world: int, width: int = 576) -> torch.Tensor:
    return torch.randn(count, HEADS * world, width, dtype=torch.bfloat16)


def assert_close(got: torch.Tensor, want: np.ndarray) -> None:
    np.testing.assert_allclose(got.double().numpy().reshape(want.shape), want, atol=BF16, rtol=BF16)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize(("world", "comm"), CLUSTERS)
def test_decode(world: int, comm: str, kv_dtype: torch.dtype) -> None:
    cluster = Cluster(world, comm=comm, kv_dtype=kv_dtype)
    batches, q = cluster.batches(DECODE, [1] * 5, LENS, LENS), queries(5, world)
    assert_close(cluster.attend(batches, q), cluster.want(batches, q))
    here = [model.backend.forward_metadata.seq_lens for model in cluster.models]
    assert torch.equal(torch.stack(here).sum(0), torch.tensor(LENS)) and int(here[-1].min()) == 0


@pytest.mark.parametrize("lens", [[70, 1, 129], [70]], ids=["three requests", "one request"])
def test_replicated_queries(lens: list[int]) -> None:
    """Every rank computes those of all ranks, --dcp-replicate-q-proj."""
    cluster, q = Cluster(2), queries(len(lens), 2)
    batches = cluster.batches(DECODE, [1] * len(lens), lens, lens)
    assert_close(cluster.attend(batches, q, replicated=True), cluster.want(batches, q))


@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_pages(page_size: int) -> None:
    cluster = Cluster(2, page_size=page_size, drafts=2)
    lens, q = [70, 2, 129], queries(6, 2)
    batches = cluster.batches(VERIFY, [2] * 3, lens, [n - 2 for n in lens])
    assert_close(cluster.attend(batches, q), cluster.want(batches, q))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize(("world", "comm"), CLUSTERS)
def test_target_verify(world: int, comm: str, kv_dtype: torch.dtype) -> None:
    """Each token sees another number of a rank's keys, and the first ones of a short request none of some ranks'."""
    cluster = Cluster(world, comm=comm, kv_dtype=kv_dtype, drafts=4)
    lens, q = [70, 4, 131, 6, 256], queries(20, world)
    batches = cluster.batches(VERIFY, [4] * 5, lens, [n - 4 for n in lens])
    assert_close(cluster.attend(batches, q), cluster.want(batches, q))


@pytest.mark.parametrize("world", [2, 3])
def test_the_lengths_of_a_rank_are_sglangs(world: int) -> None:
    from sglang.srt.layers.dcp.layout import get_dcp_chain_spec_lens, get_dcp_lens

    all_lens = torch.arange(4, 300)
    for rank in range(world):
        model = Model(drafts=4, ranks=Ranks(world, rank))
        here, visible = model.backend._lens_here(all_lens, 4)
        assert here.dtype == visible.dtype == torch.int32
        assert torch.equal(here, get_dcp_lens(all_lens, world, rank).int())
        assert torch.equal(visible.flatten(), get_dcp_chain_spec_lens(all_lens, 4, world, rank))
        assert model.backend._lens_here(all_lens, 1)[1] is None


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("mode", "drafts"), [(DECODE, 0), (VERIFY, 4)], ids=["decode", "verify"])
def test_graphs_read_memory_of_their_own(mode: Any, drafts: int, world: int) -> None:
    """Captured with the lengths that SGLang fills in, replayed with a batch of fewer requests than the graph has."""
    cluster, count, lens = Cluster(world, drafts=drafts), drafts or 1, [70, 30, 129]
    counted = [n - drafts for n in lens]
    batches, q = cluster.batches(mode, [count] * 3, lens, counted), queries(3 * count, world)
    for model in cluster.models:
        model.backend.init_cuda_graph_state(max_bs=8, max_num_tokens=8 * count)
        fill = model.backend.get_cuda_graph_seq_len_fill_value()
        captured, replayed = (
            SimpleNamespace(
                forward_mode=mode, batch_size=4, req_pool_indices=torch.tensor(requests), seq_lens=torch.tensor(lengths)
            )
            for requests, lengths in (
                ([0] * 4, [fill] * 4),
                ([SPARE, SPARE + 1, SPARE + 2, 0], [*counted, fill]),
            )
        )  # fmt: skip
        with settings(drafts, model.ranks):
            model.backend.init_forward_metadata_out_graph(captured, in_capture=True)
            held = model.backend.forward_metadata
            model.backend.init_forward_metadata_out_graph(replayed)
        metadata = model.backend.forward_metadata
        for name in ("block_tables", "seq_lens", "visible_lens"):
            before, after = getattr(held, name), getattr(metadata, name)
            assert before is after is None or (before.data_ptr() == after.data_ptr() and before.shape == after.shape)
        assert metadata.block_tables.shape[1] == -(-sglang_model.CONTEXT // (64 * world))
        assert (metadata.visible_lens is None) == (mode is DECODE)
        # The layer of a graph has the padded batch; here it runs what is not padding.
        metadata.block_tables, metadata.seq_lens = metadata.block_tables[:3], metadata.seq_lens[:3]
        if metadata.visible_lens is not None:
            metadata.visible_lens = metadata.visible_lens[:3]
    assert_close(cluster.attend(batches, q, planned=True), cluster.want(batches, q))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_absorbed_prompts(world: int, kv_dtype: torch.dtype) -> None:
    """Without the chunked prefix cache: SGLang gathers the keys of all ranks. A cached prefix is whole pages."""
    cluster, new = Cluster(world, kv_dtype=kv_dtype, page_size=16), [5, 40, 1]
    lens = [48 * world + 5, 40, 16 * world + 1]
    batches, q = cluster.batches(EXTEND, new, lens, lens), queries(46, world)
    assert_close(cluster.attend(batches, q), cluster.want(batches, q))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("lens", [[40, 33, 1], [70, 140, 129]], ids=["no prefix", "a prefix in chunks"])
def test_prompts(lens: list[int], world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's chunked method, which gathers each chunk of the prefix from all ranks."""
    monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", "150")  # 50 tokens of each request
    cluster, new = Cluster(world), [40, 33, 1]
    batches, q = cluster.batches(EXTEND, new, lens, lens), queries(sum(new), world, NOPE + ROPE)
    assert_close(cluster.prefill(batches, q), cluster.want_expanded(batches, q))


def test_the_kernels_of_a_rank_are_compiled_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[Any] = []
    monkeypatch.setattr(mla_decode, "warm", lambda spec, index, *, split_q: warmed.append(spec))
    monkeypatch.setattr(mla_prefill, "warm", lambda *arguments, **options: None)
    monkeypatch.setattr(backend.devices, "index_of", lambda device: 0)
    model = Model(drafts=4, ranks=Ranks(2, 1))
    model.backend._compile((NOPE + ROPE, 128))
    steps = {(1, False, 2 * HEADS, False), (4, False, 2 * HEADS, True)}
    assert {(spec.max_q_len, spec.ragged, spec.num_heads, spec.visible_lens) for spec in warmed} == steps
    # Prompts with a cached prefix are absorbed then.
    with sglang_model.get_schedule().override(disable_chunked_prefix_cache=True):
        model.backend._compile((NOPE + ROPE, 128))
    prompts = {(sglang_model.CONTEXT, True, HEADS, False)}
    assert {(spec.max_q_len, spec.ragged, spec.num_heads, spec.visible_lens) for spec in warmed} == steps | prompts


def test_refusals() -> None:
    def refused(said: str, config: dict[str, Any] | None = None, **changed: Any) -> None:
        runner = SimpleNamespace(**(vars(Model().runner) | changed))
        runner.model_config = SimpleNamespace(**(vars(runner.model_config) | (config or {})))
        with pytest.raises(NotImplementedError, match=said), settings(0, Ranks(2)):
            plugin.create_backend(runner)

    said = "--dcp-size: got 2; legal with tsmla: 1 for a"
    refused(f"{said} draft model", is_draft_worker=True)
    refused(f"{said} model without rope columns", {"qk_rope_head_dim": 0})
    refused(f"{said} model with queries scaled", {"hf_config": SimpleNamespace(llama_4_scaling={"beta": 0.1})})
    refused("page size is 1; .*; pass --page-size 64", page_size=1)
    refused("unified memory", kv_index_translator=SimpleNamespace(is_translating=True))


def test_queries_that_are_not_gathered_are_refused() -> None:
    """Those of a model with a layer of its own, and those of DeepSeek's when drafts are extended."""
    cluster, lens = Cluster(2, drafts=4), [70, 4, 129]
    with pytest.raises(NotImplementedError, match=r"--dcp-size: got 2; .* they have 4 heads, not 8"):
        cluster.models[0].attend(cluster.batches(DECODE, [1] * 3, lens, lens)[0], queries(3, 1), apart=True)
    with pytest.raises(NotImplementedError, match=r"--dcp-size: got 2; .* they have 4 heads, not 8"):
        cluster.attend(cluster.batches(DRAFT_EXTEND, [4] * 3, lens, lens), queries(12, 2))
