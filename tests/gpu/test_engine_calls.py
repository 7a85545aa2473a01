"""Calls as the engines' plug-ins make them, on a GPU: the bits of a request under batch invariance, scales that are
loaded anew under a captured graph, prompts under the bound of a whole context, and slots of selected positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tsmla_bridge
from tests.engines import positions
from tests.gpu.small_grid import NARROW_BOUNDS
from tests.gpu.stress import assert_same_bits
from tsmla_bridge.engines.vllm import slots
from tsmla_bridge.engines.vllm.step import LayerScales, OncePerStep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_in_torch")]

SCALE = 192**-0.5
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PAGES = 64  # a request's, of 64 tokens


def made(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(BF16).to(dtype)


def tables_of(count: int) -> torch.Tensor:
    return torch.arange(count * PAGES, dtype=torch.int32, device="cuda").view(count, PAGES)


def starts_of(new: list[int]) -> torch.Tensor:
    return torch.tensor([0, *new], dtype=torch.int32, device="cuda").cumsum(0).to(torch.int32)


# Beside a request of some new tokens: others, by theirs. vLLM's builder leaves to prefill whoever has more than a token
# and the drafts, so of a step with an extend of 5 tokens the decode path has the rest.
BESIDE: dict[str, tuple[list[int], list[int]]] = {  # without drafts, with three
    "alone": ([], []),
    "a decode": ([1], [4]),
    "decodes": ([1] * 9, [4] * 9),
    "many decodes": ([1] * 150, [4] * 150),
    "unequal drafts": ([1], [3, 1, 2, 4]),
    "an extend of 5 tokens, which prefill takes": ([], []),
    "padding": ([0], [0, 0]),
}


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, BF16), (BF16, FP8), (FP8, FP8)], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_requests_bits_do_not_depend_on_the_batch(
    drafts: int, heads: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    most = 1 + drafts
    everyone = 152
    pages, tables = made(everyone * PAGES, 64, 576, dtype=kv_dtype), tables_of(everyone)
    mine = made(most, heads, 576, dtype=dtype)
    others = made(4 * everyone, heads, 576, dtype=dtype)

    def attend(beside: list[int], first: bool, length: int, count: int) -> Any:
        """My rows, at the front or the end of the batch, with `count` new tokens of mine."""
        new = [count, *beside] if first else [*beside, count]
        place = 0 if first else sum(beside)
        rest = others[: sum(beside)]
        q = torch.cat((mine[:count], rest) if first else (rest, mine[:count]))
        lens = torch.randint(1, PAGES * 64, (len(new),), device="cuda").to(torch.int32)
        lens[torch.tensor(new, device="cuda") == 0] = 0
        request = 0 if first else len(new) - 1
        lens[request] = length
        table = tables[torch.randperm(everyone)[: len(new)].cuda()].contiguous()
        table[request] = tables[0]
        options: dict[str, Any] = {"cu_seqlens_q": starts_of(new), "max_q_len": most}
        if not drafts and all(new):
            q, options = q[:, None], {}
        out, lse = tsmla_bridge.mla_decode(
            q.contiguous(), pages, table, lens, softmax_scale=SCALE, return_lse=True, batch_invariant=True, **options
        )
        rows = slice(place, place + count)
        return out.view(-1, heads, 512)[rows], lse.view(-1, heads)[rows]

    for length in (most, 511, 3000, PAGES * 64):
        for count in {1, most}:
            want = attend([], True, length, count)
            for name, beside in BESIDE.items():
                for first in (True, False):
                    if name != "padding" or first:  # padding lies behind
                        assert_same_bits(attend(beside[drafts > 0], first, length, count), want)


@pytest.mark.parametrize("quantised", [True, False])
def test_a_graph_sees_scales_that_were_loaded_after_its_capture(quantised: bool) -> None:
    """One product serves the layers of a step, in the graph too."""
    names = ("first", "second", "third")
    layers = {
        name: SimpleNamespace(
            _q_scale=torch.tensor(1.0, device="cuda"), _k_scale=torch.tensor(1.0, device="cuda"),
            impl=SimpleNamespace(scale=SCALE, supports_quant_query_input=quantised),
        )
        for name in names
    }  # fmt: skip
    scales = LayerScales(layers, torch.device("cuda", 0), lambda softmax, q, k: (softmax * q * k, k))
    q = made(4, 1, 16, 576, dtype=FP8 if quantised else BF16)
    pages, tables = made(4 * PAGES, 64, 576, dtype=FP8), tables_of(4)
    lens = torch.tensor([3000, 1, 64, 700], dtype=torch.int32, device="cuda")

    def product(name: str, shared: OncePerStep) -> Any:
        return scales.of(name, shared)

    def step() -> list[torch.Tensor]:
        shared = OncePerStep()
        return [tsmla_bridge.mla_decode(q, pages, tables, lens, softmax_scale=product(name, shared)) for name in names]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for q_scale, k_scale in ((1.0, 1.0), (0.5, 0.25), (2.0, 3.0)):
        for place, layer in enumerate(layers.values(), 1):
            layer._q_scale.data.copy_(torch.tensor(q_scale * place))
            layer._k_scale.fill_(k_scale * place)
        graph.replay()
        torch.cuda.synchronize()
        for place, got in enumerate(captured, 1):
            want = tsmla_bridge.mla_decode(
                q, pages, tables, lens, softmax_scale=SCALE, q_scale=q_scale * place if quantised else None,
                kv_scale=k_scale * place,
            )  # fmt: skip
            torch.testing.assert_close(got.float(), want.float(), atol=1e-3, rtol=2.01 / 128)


@pytest.mark.parametrize("new", [[1], [2, 3], [5, 1, 1], [64], [300, 1, 40], [2000]], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_prompts_under_the_bound_of_a_context(heads: int, new: list[int]) -> None:
    """SGLang's absorbed prompts have one kernel, whose bound is no part of a result."""
    pages, tables = made(len(new) * PAGES, 64, 576), tables_of(len(new))
    lens = torch.tensor([count + 700 for count in new], dtype=torch.int32, device="cuda")
    q = made(sum(new), heads, 576)
    options: dict[str, Any] = {"softmax_scale": SCALE, "cu_seqlens_q": starts_of(new), "return_lse": True}
    got = tsmla_bridge.mla_decode(q, pages, tables, lens, max_q_len=1 << 18, **options)
    want = tsmla_bridge.mla_decode(q, pages, tables, lens, max_q_len=max(new), implementation="reference", **options)
    for of_token, right in zip(got[0].float(), want[0].float(), strict=True):
        assert (of_token - right).norm() <= NARROW_BOUNDS[BF16] * right.norm()
    torch.testing.assert_close(got[1], want[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [None, 16, 20, 128], ids=str)
@pytest.mark.parametrize("columns", [2048, 130])
def test_positions_become_slots(columns: int, heads: int | None) -> None:
    given = positions.selected(columns, heads, "cuda")
    got = slots.selected(*given)
    want = slots.Selected(*(None if each is None else torch.empty_like(each) for each in got))
    slots._make_by_torch(*given, want)
    assert torch.equal(got.slots, want.slots) and torch.equal(got.counts, want.counts)
    assert (got.joined is None) == (heads is None)
    assert got.joined is None or torch.equal(got.joined, want.joined)


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("tokens", [1, 64, 600])
def test_a_graph_replays_with_other_positions(tokens: int, joins: bool) -> None:
    """The kernel that attends may start before its slots and its query are there. It reads a query in two tensors as
    it reads one, bit by bit."""
    cache, requests = made(2 * PAGES * 64, 1, 576), torch.zeros(tokens, dtype=torch.int32, device="cuda")
    pages = slots.Pages(torch.randperm(2 * PAGES, device="cuda").to(torch.int32).view(2, PAGES), 64, 64)
    chosen = torch.empty(tokens, 2048, dtype=torch.int32, device="cuda")
    latent, rope = made(128, tokens, 512).transpose(0, 1), made(tokens, 128, 192)[..., 128:]

    def attend() -> torch.Tensor:
        found = slots.selected(chosen, requests, pages, (latent, rope) if joins else None)
        q: Any = (latent, rope) if found.joined is None else found.joined
        out: torch.Tensor = tsmla_bridge.sparse_mla(q, cache, found.slots, found.counts, softmax_scale=SCALE)
        return out

    def draw() -> None:
        chosen.copy_(torch.randint(0, PAGES * 64, chosen.shape, device="cuda"))
        chosen[:, 1500:] = -1
        requests.copy_(torch.randint(0, 2, (tokens,), device="cuda"))
        latent.normal_()

    draw()
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for _ in range(3):
        draw()
        graph.replay()
        torch.cuda.synchronize()
        of_token = pages.table[requests.long()].gather(1, chosen.clamp(min=0).div(64, rounding_mode="floor").long())
        rows = torch.where(chosen >= 0, of_token * 64 + chosen % 64, -1)
        counts = torch.full_like(requests, 1500)
        want = tsmla_bridge.sparse_mla(torch.cat((latent, rope), -1), cache, rows, counts, softmax_scale=SCALE)
        assert torch.equal(captured, want)
