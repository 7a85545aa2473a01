"""Decode's queries in two tensors on a GPU: the bits of the same query in one, and the values of float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import tsmla_bridge
from tests.oracles.attention import batched_decode
from tests.oracles.inputs import decode_numbers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_in_torch")]

SCALE = 192**-0.5
FP8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Call:
    """A query in one tensor and the same in two, the rope columns inside a tensor whose others are NaN."""

    whole: torch.Tensor
    parts: tuple[torch.Tensor, torch.Tensor]
    others: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def make(cls, shape: tuple[int, int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype, page: int) -> Call:
        arrays = decode_numbers(*shape, page=page)
        q, cache, tables, lens = (torch.from_numpy(np.ascontiguousarray(array)).cuda() for array in arrays)
        tables, lens = tables.to(torch.int32), lens.to(torch.int32)
        whole = q.to(dtype)
        wide = torch.full((*whole.shape[:-1], 192), torch.nan, device="cuda").to(dtype)
        wide.view(torch.uint8)[..., 128 * dtype.itemsize :] = whole.view(torch.uint8)[..., 512 * dtype.itemsize :]
        return cls(whole, (whole[..., :512].contiguous(), wide[..., 128:]), (cache.to(kv_dtype), tables, lens))

    def run(self, q: Any, **options: Any) -> Any:
        return tsmla_bridge.mla_decode(q, *self.others, softmax_scale=SCALE, return_lse=True, **options)


CASES = [
    ((7, 1, 16, 20), torch.bfloat16, torch.bfloat16, 64),
    ((5, 2, 128, 9), torch.bfloat16, torch.bfloat16, 64),
    ((64, 4, 16, 33), torch.bfloat16, torch.bfloat16, 16),
    ((7, 1, 16, 20), torch.float16, torch.float16, 64),
    ((64, 4, 16, 33), torch.bfloat16, FP8, 64),
    ((5, 2, 128, 9), torch.bfloat16, FP8, 64),
    ((7, 1, 16, 20), FP8, FP8, 64),
]


@pytest.mark.parametrize(("shape", "dtype", "kv_dtype", "page"), CASES)
def test_the_bits_are_those_of_one_tensor(
    shape: tuple[int, int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype, page: int
) -> None:
    call = Call.make(shape, dtype, kv_dtype, page)
    out, lse = call.run(call.whole)
    got, got_lse = call.run(call.parts)
    assert torch.equal(got, out) and torch.equal(got_lse, lse)
    heads_first = call.parts[0].movedim(-2, 0).contiguous().movedim(0, -2)
    for result, same in zip(call.run((heads_first, call.parts[1])), (out, lse), strict=True):
        assert torch.equal(result, same)
    if dtype is kv_dtype is torch.bfloat16:
        given = [x.float().cpu().numpy() if x.is_floating_point() else x.cpu().numpy() for x in call.others]
        want, want_lse = batched_decode(call.whole.float().cpu().numpy(), *given, scale=SCALE)
        np.testing.assert_allclose(got.float().cpu().numpy(), want, atol=2**-8, rtol=2**-7)
        np.testing.assert_allclose(got_lse.cpu().numpy(), want_lse, atol=1e-4)


def test_ragged() -> None:
    call = Call.make((6, 4, 16, 20), torch.bfloat16, torch.bfloat16, 64)
    counts = torch.tensor([4, 1, 3, 2, 4, 1])
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).to(torch.int32).cuda()
    rows = int(counts.sum())
    options = {"cu_seqlens_q": starts, "max_q_len": 4}
    # Slices of tensors with more rows: the last row of the rope columns isn't whole.
    whole, latent, rope = (x.flatten(0, 1)[:rows] for x in (call.whole, *call.parts))
    out, lse = call.run(whole, **options)
    for given in (latent, latent.transpose(0, 1).contiguous().transpose(0, 1)):
        got, got_lse = call.run((given, rope), implementation="cute", **options)
        assert torch.equal(got, out) and torch.equal(got_lse, lse)


def test_a_graph_reads_both() -> None:
    call = Call.make((8, 1, 16, 20), torch.bfloat16, torch.bfloat16, 64)
    call.run(call.parts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, _ = call.run(call.parts)
    for part in call.parts:
        part.copy_(torch.randn_like(part))
    graph.replay()
    want, _ = call.run(torch.cat(call.parts, -1))
    assert torch.equal(got, want)
