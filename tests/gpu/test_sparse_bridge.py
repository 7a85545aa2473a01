"""select_topk and the packed caches on torch tensors on a GPU: the kernels against torch operations, in CUDA graphs and
under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tsmla_bridge

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_in_torch")]

ROWS, COLUMNS, K = 6, 20011, 512


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def rows_and_lens() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(ROWS, COLUMNS, device="cuda")
    logits[:, ::7] = 0
    logits[2, ::3] = float("nan")
    logits[2, 1::3] = -torch.inf
    return logits, ints(COLUMNS, 0, COLUMNS, K, COLUMNS // 2, 300)


@pytest.mark.parametrize("order", ["value", "position"])
@pytest.mark.parametrize("starts", [False, True])
def test_positions(order: str, starts: bool) -> None:
    logits, lens = rows_and_lens()
    options: dict[str, Any] = {"order": order}
    if starts:
        options["row_starts"] = ints(0, 7, 130, 1000, 9000, COLUMNS - 300)
        lens = torch.minimum(lens, COLUMNS - options["row_starts"])
    got, want = (
        tsmla_bridge.select_topk(logits, lens, K, **options, implementation=name) for name in ("cute", "reference")
    )
    assert torch.equal(got, want)


def test_slots_in_a_graph_with_new_lengths() -> None:
    logits, lens = rows_and_lens()
    tables = torch.randint(0, 4000, (ROWS, COLUMNS // 64), dtype=torch.int32, device="cuda")
    out, counts = torch.empty(ROWS, K, dtype=torch.int32, device="cuda"), torch.empty_like(lens)
    options: dict[str, Any] = {"order": "position", "block_tables": tables, "page_size": 64}

    def run() -> None:
        tsmla_bridge.select_topk(logits, lens, K, **options, out=out, counts=counts, implementation="cute")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for change in (0, 1000):
        lens.copy_((lens - change).clamp(min=0))
        logits.normal_()
        graph.replay()
        want = tsmla_bridge.select_topk(logits, lens, K, **options, implementation="reference")
        assert torch.equal(out, want[0]) and torch.equal(counts, want[1])


def test_under_the_compiler() -> None:
    logits, lens = rows_and_lens()

    def step(logits: torch.Tensor) -> torch.Tensor:
        return tsmla_bridge.select_topk(logits * 2, lens, K, order="position")

    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(logits), step(logits))


def test_compression_in_a_graph() -> None:
    """A step of four requests with states of their own, repeated by a CUDA graph with other numbers."""
    batch, ratio, channels = 4, 4, 512
    scores = [torch.randn(batch, 2, 2 * channels, device="cuda") for _ in range(6)]
    ape, cos_sin = torch.randn(ratio, 2 * channels, device="cuda"), torch.randn(64, 64, device="cuda")
    weight, tables = torch.rand(channels, device="cuda"), torch.arange(batch, device="cuda").int()[:, None]
    where = {"state_slots": ints(2, 0, 3, 1), "cu_seqlens_q": ints(0, 1, 2, 3, 4)}
    held = {}
    for name in ("cute", "reference"):
        cache = torch.zeros(batch, 65 * 576, dtype=torch.uint8, device="cuda")
        state = torch.zeros(batch, 8, 2, 2 * channels, device="cuda")
        positions = torch.full((batch, 8), -1, dtype=torch.int32, device="cuda")
        kv_score, lens = scores[0].clone(), ints(1, 1, 1, 1)

        def run(
            name: str = name,
            arrays: tuple[torch.Tensor, ...] = (cache, kv_score, ape, state, positions, weight, cos_sin, tables),
            lens: torch.Tensor = lens,
        ) -> None:
            tsmla_bridge.compress_write_kv_cache(
                *arrays,
                **where,
                seq_lens=lens,
                ratio=ratio,
                overlap=True,
                eps=1e-6,
                implementation=name,
            )

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for step in scores[1:]:
            kv_score.copy_(step)
            lens.add_(1)
            graph.replay()
        held[name] = cache, state, positions
    for got, want in zip(held["cute"][1:], held["reference"][1:], strict=True):
        assert torch.equal(got, want)
    got, want = (held[name][0] for name in ("cute", "reference"))
    assert (got != 0).any() and (got != want).float().mean() < 1e-4


@pytest.mark.parametrize("tokens", [1, 37, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_caches_and_queries(dtype: torch.dtype, tokens: int) -> None:
    slots = torch.randperm(8192, device="cuda")[:tokens].int()
    slots[tokens // 2 :: 9] = -1
    wide = torch.randn(tokens, 640, device="cuda", dtype=dtype)
    latent, k_rope, k = wide[:, :512], wide[:, 512:576], torch.randn(tokens, 128, device="cuda", dtype=dtype)
    for op, width, inputs in (("write_packed_kv_cache", 656, (latent, k_rope)), ("write_indexer_cache", 132, (k,))):
        cache = torch.randint(0, 256, (128, 64, width), dtype=torch.uint8, device="cuda")
        caches = [cache.clone(), cache.clone()]
        for name, each in zip(("cute", "reference"), caches, strict=True):
            getattr(tsmla_bridge, op)(each, *inputs, slots, implementation=name)
        assert torch.equal(*caches)
        wide_slots = slots.long()
        wide_slots[slots < 0] = 2**32 + 1  # outside the cache, though its lower half is not
        getattr(tsmla_bridge, op)(cache, *inputs, wide_slots)
        assert torch.equal(cache, caches[0])
    q, weights = torch.randn(tokens, 64, 128, device="cuda", dtype=dtype), torch.randn(tokens, 64, device="cuda")
    (q8, folded), (want, wanted) = (
        tsmla_bridge.indexer_quantize(q, weights.to(dtype), implementation=name) for name in ("cute", "reference")
    )
    assert torch.equal(q8.view(torch.uint8), want.view(torch.uint8))
    torch.testing.assert_close(folded, wanted, rtol=1e-6, atol=0)
