"""mla_decode on torch tensors with the number of keys that each token sees: as in jax, and as the kernel gets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tsmla_bridge
from tests.bridge.inputs import BF16, Inputs, assert_close, attend, served
from tests.emulator.launcher import Gpu
from tsmla_bridge.engines.context_parallel import Deal, visible_keys, visible_keys_of_last
from tsmla_bridge.ops import decode_plans, plans

LENS, S = [33, 5, 0, 20], 3
VISIBLE = torch.tensor([[30, 33, -1], [0, 5, 2], [0, 0, 7], [99, 20, 1]], dtype=torch.int32)


def case(**shape: Any) -> Inputs:
    return served(LENS, s=S, **shape)


def of_tokens(given: Inputs) -> tuple[torch.Tensor, ...]:
    """The call with each token as a request of its own."""
    q, cache, tables, lens = given.arrays
    seen = torch.minimum(VISIBLE.clamp(min=0), lens[:, None]).view(-1)
    return q.reshape(-1, 1, *q.shape[2:]), cache, tables.repeat_interleave(S, 0), seen


def assert_right(got: Any, given: Inputs, **options: Any) -> None:
    out, lse = tsmla_bridge.mla_decode(
        *of_tokens(given), **given.options, return_lse=True, implementation="reference", **options
    )
    for result, want, tolerance in zip(got, (out, lse), (BF16, 1e-4), strict=True):
        assert_close(result, want.view(result.shape).double().numpy(), tolerance)


def test_on_a_cpu() -> None:
    given = case()
    assert_right(attend(given, visible_lens=VISIBLE), given)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_kernel_gets_it(gpu: Gpu, batch_invariant: bool, ragged: bool) -> None:
    given, visible = case(), VISIBLE
    changed: dict[str, Any] = {}
    if ragged:
        offsets = torch.arange(0, len(LENS) * S + 1, S, dtype=torch.int32)
        changed = {"q": given.q.flatten(0, 1), "cu_seqlens_q": offsets, "max_q_len": S}
        visible = VISIBLE.view(-1)
    for _ in range(2):  # the second by the latest plan
        got = attend(given, visible_lens=visible, batch_invariant=batch_invariant, implementation="cute", **changed)
        assert_right(got, given)
    assert gpu.loads == 1 and gpu.operands["visible_lens"].data_ptr() == visible.data_ptr()
    assert gpu.operands["visible_lens"].shape == (len(LENS) * S,)


def test_large_batches_take_several_launches(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plans.sm90_decode, "launches", lambda *arguments: [(0, 1), (1, 4)])
    given = case()
    got = attend(given, visible_lens=VISIBLE, batch_invariant=True, implementation="cute")
    assert_right(got, given)
    assert [operands["visible_lens"].tolist() for _, operands in gpu.launches] == [
        VISIBLE[:1].flatten().tolist(), VISIBLE[1:].flatten().tolist()
    ]  # fmt: skip


def test_with_a_query_in_two_tensors(gpu: Gpu) -> None:
    given = case()
    parts = (given.q[..., :256].contiguous(), given.q[..., 256:])
    for _ in range(2):
        assert_right(attend(given, q=parts, visible_lens=VISIBLE, implementation="cute"), given)
    assert gpu.loads == 1 and "q_rope" in gpu.operands


@pytest.mark.parametrize("count", [0, 1, 3])
def test_tuples_that_are_no_pairs_are_refused_after_good_calls(count: int) -> None:
    """The plan of the latest call is not taken for such a tuple."""
    given = case()
    for q in (given.q, (given.q[..., :256].contiguous(), given.q[..., 256:].contiguous())):
        attend(given, q=q, visible_lens=VISIBLE)
        with pytest.raises(ValueError, match=f"q: got a tuple of {count}; legal: one tensor, or the pair"):
            attend(given, q=(given.q,) * count, visible_lens=VISIBLE)


def test_one_options_with_and_without_it(gpu: Gpu) -> None:
    """Plans of the one are not taken for those of the other."""
    given = case()
    for _ in range(2):
        assert_right(attend(given, visible_lens=VISIBLE, implementation="cute"), given)
        out, _ = attend(given, implementation="cute")
        want, _ = attend(given, implementation="reference")
        assert_close(out, want.double().numpy(), BF16)


def test_the_kernel_runs_by_default(gpu: Gpu) -> None:
    given = case()
    assert_right(attend(given, visible_lens=VISIBLE), given)
    assert len(gpu.launches) == 1 and "visible_lens" in gpu.operands


def test_under_the_compiler() -> None:
    given = case()

    def step(q: torch.Tensor, visible: torch.Tensor) -> Any:
        return attend(given, q=q, visible_lens=visible)

    assert_right(torch.compile(step, backend="aot_eager", fullgraph=True)(given.q, VISIBLE), given)


def test_unsound_values_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "latest_plans", {})
    with pytest.raises(ValueError, match="visible_lens: token 2 sees -1 keys; legal: 0 to 33"):
        attend(case(), visible_lens=VISIBLE)


def test_it_must_have_the_tokens_of_the_query() -> None:
    with pytest.raises(ValueError, match=r"visible_lens: got shape \[4, 2\]"):
        attend(case(), visible_lens=VISIBLE[:, :2].contiguous())


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("world", [2, 3])
def test_what_a_rank_of_a_context_holds(world: int, interleave: int) -> None:
    """Counted one by one: key k is on the rank whose turn it is."""
    all_lens = torch.tensor([3, 4, 17, 70, 0])
    seen = [n - S + 1 + i for n in all_lens.tolist() for i in range(S)]
    for rank in range(world):
        deal = Deal(world, rank, interleave)
        held = [sum(key // interleave % world == rank for key in range(count)) for count in seen]
        got = visible_keys_of_last(all_lens, S, deal)
        assert got.shape == (5, S) and got.dtype == torch.int32 and got.flatten().tolist() == held
        starts = torch.arange(0, 5 * S + 1, S, dtype=torch.int32)
        assert torch.equal(visible_keys(starts, all_lens, got[:, -1], 5 * S, deal), got.flatten())
