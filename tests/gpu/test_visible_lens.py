"""The decode kernel with the number of keys that each token sees, against the proven kernel with each token as a
request of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tsmla_bridge
from tests.gpu.stress import arrays, assert_same_bits
from tests.oracles.attention import fp8_lse_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_in_torch")]

SCALE = 192**-0.5
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def attend(*args: Any, **options: Any) -> Any:
    return tsmla_bridge.mla_decode(
        *args, **({"softmax_scale": SCALE, "return_lse": True, "implementation": "cute"} | options)
    )


def visible_of(lens: torch.Tensor, q_len: int, kind: str) -> torch.Tensor:
    """[B, S]: a rank's keys of two as context parallelism deals them out, or any numbers, unsound ones among them."""
    token = torch.arange(q_len, device="cuda", dtype=torch.int32)
    if kind == "context parallel":
        return ((lens[:, None] - (q_len - 1) + token).clamp(min=0) // 2).to(torch.int32)
    most = int(lens.max()) + 9
    return torch.randint(-3, most, (len(lens), q_len), device="cuda", dtype=torch.int32)


def by_token(args: Any, visible: torch.Tensor, **options: Any) -> Any:
    q, cache, tables, lens = args
    seen = torch.minimum(visible.clamp(min=0), lens[:, None]).view(-1).contiguous()
    rows = q.reshape(-1, 1, *q.shape[2:])
    out, lse = attend(rows, cache, tables.repeat_interleave(q.shape[1], 0), seen, **options)
    return out.view(*q.shape[:-1], -1), lse.view(q.shape[:-1])


def assert_close(got: Any, want: Any, dtype: torch.dtype) -> None:
    step = fp8_lse_error(576) if dtype == FP8 else 1e-5
    torch.testing.assert_close(got[0].float(), want[0].float(), atol=2e-3, rtol=2.01 / 128)
    torch.testing.assert_close(got[1], want[1], atol=2 * step, rtol=2 * step)


@pytest.mark.parametrize("kind", ["context parallel", "any"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, BF16), (BF16, FP8), (FP8, FP8)])
@pytest.mark.parametrize(
    ("batch", "q_len", "heads", "max_pages"),
    [(1, 4, 16, 300), (33, 4, 16, 9), (7, 2, 128, 20), (16, 3, 9, 40), (5, 70, 1, 12), (40, 4, 128, 6)],
)
def test_equals_tokens_as_requests(
    batch: int, q_len: int, heads: int, max_pages: int, dtype: torch.dtype, kv_dtype: torch.dtype, kind: str
) -> None:
    args = arrays(batch, q_len, heads, max_pages, dtype=dtype, kv_dtype=kv_dtype)
    visible = visible_of(args[3], q_len, kind)
    assert_close(attend(*args, visible_lens=visible), by_token(args, visible), dtype)


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"split": True}, {"ragged": True}], ids=str)
def test_other_forms(options: dict[str, bool]) -> None:
    args = arrays(9, 4, 16, 30)
    visible = visible_of(args[3], 4, "any")
    want = by_token(args, visible)
    q, *others = args
    if "split" in options:
        got = attend((q[..., :512].contiguous(), q[..., 512:]), *others, visible_lens=visible)
    elif "ragged" in options:
        offsets = torch.arange(0, 37, 4, device="cuda", dtype=torch.int32)
        flat = attend(q.flatten(0, 1), *others, visible_lens=visible.view(-1), cu_seqlens_q=offsets, max_q_len=4)
        got = tuple(x.view(y.shape) for x, y in zip(flat, want, strict=True))
    else:
        got = attend(*args, visible_lens=visible, **options)
        alone = attend(q[3:4], others[0], *(x[3:4] for x in others[1:]), visible_lens=visible[3:4], **options)
        assert_same_bits([x[3:4] for x in got], alone)
    assert_close(got, want, BF16)


def test_the_causal_rule_has_the_same_bits() -> None:
    args = arrays(33, 4, 16, 9)
    token = torch.arange(4, device="cuda", dtype=torch.int32)
    visible = (args[3][:, None] - 3 + token).to(torch.int32)
    assert_same_bits(attend(*args, visible_lens=visible), attend(*args))


def test_a_graph_sees_new_values() -> None:
    args = arrays(9, 4, 16, 30)
    visible = visible_of(args[3], 4, "any")
    out, lse = attend(*args, visible_lens=visible)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(*args, visible_lens=visible, out=out, lse=lse)
    for _ in range(3):
        visible.copy_(visible_of(args[3], 4, "any"))
        graph.replay()
        assert_close((out, lse), by_token(args, visible), BF16)
