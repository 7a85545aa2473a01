"""Products with block scales by their kernels, beside a float64 product of the same numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

import tsmla_bridge

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
MATRICES = ((2112, 7168), (1536, 10944), (4096, 512))
ROWS = (1, 8, 16, 33, 64, 128, 300)
MANY_ROWS = 1100
SKEWS = ([5, 0, 130, 1, 16, 200, 0, 33], [0, 0, 385, 0], [3] * 64)


def numbers(*shape: int) -> torch.Tensor:
    """Finite e4m3 of all magnitudes."""
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    return (bits & 0xB7).view(torch.float8_e4m3fn)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device=DEVICE) * 0.02 + 0.001


def widened(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return values.double() * factors.repeat_interleave(128, -1)[..., : values.shape[-1]]


def product(x: torch.Tensor, weight: torch.Tensor, of_x: torch.Tensor, of_weight: torch.Tensor) -> torch.Tensor:
    rows = of_weight.repeat_interleave(128, 0)[: weight.shape[0]]
    return widened(x, of_x) @ widened(weight, rows).T


def close(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    assert float((got.double() - want).norm() / want.norm()) < limit


@pytest.mark.parametrize(("rows", "matrix"), itertools.product((*ROWS, MANY_ROWS), MATRICES))
def test_dense(rows: int, matrix: tuple[int, int]) -> None:
    columns, terms = matrix
    operands = numbers(rows, terms), numbers(columns, terms), scales(rows, -(-terms // 128))
    given = (*operands, scales(-(-columns // 128), -(-terms // 128)))
    out = tsmla_bridge.block_scaled_matmul(*given, implementation="cute")
    close(out, product(*given), 2.5e-3)
    exact = tsmla_bridge.block_scaled_matmul(*given, out_dtype=torch.float32, implementation="cute")
    close(exact, product(*given), 5e-4)  # of the tensor cores' sums over 128 terms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_16_bits_are_multiplied_exactly(rows: int, dtype: torch.dtype) -> None:
    x, weight, of_weight = torch.randn(rows, 1488, device=DEVICE).to(dtype), numbers(520, 1488), scales(5, 12)
    out = tsmla_bridge.block_scaled_matmul(x, weight, None, of_weight, out_dtype=torch.float32, implementation="cute")
    close(out, product(x, weight, torch.ones(rows, 12, device=DEVICE), of_weight), 1e-6)


@pytest.mark.parametrize("counts", SKEWS)
def test_grouped(counts: list[int]) -> None:
    rows, groups = sum(counts) + 9, len(counts)
    x, of_x = numbers(rows, 1488), scales(rows, 12)
    x.view(torch.uint8)[-9:], of_x[-9:] = 0x7F, torch.nan
    weight, of_weight = numbers(groups, 520, 1488), scales(groups, 5, 12)
    cu_rows = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
    out = torch.full((rows, 520), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    arrays = (x, weight, of_x, of_weight, cu_rows)
    got = tsmla_bridge.grouped_block_scaled_matmul(*arrays, out=out, implementation="cute")
    assert got is out and not out[-9:].any()
    ends = cu_rows.tolist()
    for group, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin < end:
            close(out[begin:end], product(x[begin:end], weight[group], of_x[begin:end], of_weight[group]), 2.5e-3)


def gated(product: torch.Tensor, limit: float | None) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up


def restored(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return widened(*result) if isinstance(result, tuple) else result


FORMS = ((torch.bfloat16, None, 2.5e-3), (torch.float8_e4m3fn, 4.0, 0.04))


@pytest.mark.parametrize("out_dtype, limit, bound", FORMS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_gated(rows: int, wide: bool, out_dtype: torch.dtype, limit: float | None, bound: float) -> None:
    weight, of_weight = numbers(768, 1488), scales(6, 12) / 400
    x, of_x = numbers(rows, 1488), scales(rows, 12) * 10
    if wide:
        x, of_x = torch.randn(rows, 1488, device=DEVICE).bfloat16(), torch.ones(rows, 12, device=DEVICE)
    given = (x, weight, None if wide else of_x, of_weight)
    form = {"gated": True, "limit": limit, "implementation": "cute"}
    out = tsmla_bridge.block_scaled_matmul(*given, out_dtype=out_dtype, **form)
    want = gated(product(x, weight, of_x, of_weight), limit)
    close(restored(out), want, bound)
    close(tsmla_bridge.block_scaled_matmul(*given, out_dtype=torch.float32, **form), want, 1e-3)


@pytest.mark.parametrize("out_dtype, limit, bound", FORMS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("counts", [*SKEWS, [1, 0, 2] * 100])
def test_picked_rows(counts: list[int], wide: bool, out_dtype: torch.dtype, limit: float | None, bound: float) -> None:
    groups, tokens = len(counts), 300
    x, of_x = numbers(tokens, 1488), scales(tokens, 12) * 10
    x.view(torch.uint8)[-9:], of_x[-9:] = 0x7F, torch.nan
    if wide:
        x, of_x = torch.randn(tokens, 1488, device=DEVICE).bfloat16(), torch.ones(tokens, 12, device=DEVICE)
        x[-9:] = torch.nan
    weight, of_weight = numbers(groups, 512, 1488), scales(groups, 4, 12) / 400
    cu_rows = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
    rows = torch.randint(0, tokens - 9, (sum(counts) + 5,), dtype=torch.int32, device=DEVICE)
    rows[-5:] = torch.tensor([-1, 1 << 30, tokens - 1, -(1 << 31), tokens], dtype=torch.int64).int()
    arrays = (x, weight, None if wide else of_x, of_weight, cu_rows)
    form = {"rows": rows, "implementation": "cute"}
    plain = tsmla_bridge.grouped_block_scaled_matmul(*arrays, **form)
    out = restored(tsmla_bridge.grouped_block_scaled_matmul(
        *arrays, gated=True, limit=limit, out_dtype=out_dtype, **form
    ))  # fmt: skip
    assert not plain[-5:].any() and not out[-5:].any()
    for group, (begin, end) in enumerate(itertools.pairwise(cu_rows.tolist())):
        if begin < end:
            own = rows[begin:end].long()
            want = product(x[own], weight[group], of_x[own], of_weight[group])
            close(plain[begin:end], want, 2.5e-3)
            close(out[begin:end], gated(want, limit), bound)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("kind", ["e4m3", "bfloat16", "bfloat16 weights"])
def test_groups_of_many_rows(kind: str, gate: bool) -> None:
    """With weights of 16 bits by pairs of CTAs; groups of no row, of one, and of an odd number of tiles."""
    counts, columns, form = [300, 0, 385, 1, 900, 130], 1024, {"gated": gate, "out_dtype": torch.float32}
    rows, groups = sum(counts), len(counts)
    cu_rows = [0, *itertools.accumulate(counts)]
    weight, of_weight = numbers(groups, columns, 1488), scales(groups, 8, 12) / 400
    x, of_x = numbers(rows + 9, 1488), scales(rows + 9, 12) * 10
    if kind != "e4m3":
        x, of_x = torch.randn(rows + 9, 1488, device=DEVICE).bfloat16(), torch.ones(rows + 9, 12, device=DEVICE)
    if kind == "bfloat16 weights":
        weight, of_weight = (weight.float() / 100).bfloat16(), torch.ones(groups, 8, 12, device=DEVICE)
    given = weight, of_x if kind == "e4m3" else None, None if kind == "bfloat16 weights" else of_weight
    offsets = torch.tensor(cu_rows, dtype=torch.int32, device=DEVICE)
    out = tsmla_bridge.grouped_block_scaled_matmul(x, *given, offsets, **form, implementation="cute")
    assert not out[-9:].any()
    for group, (begin, end) in enumerate(itertools.pairwise(cu_rows)):
        if begin < end:
            want = product(x[begin:end], weight[group], of_x[begin:end], of_weight[group])
            close(out[begin:end], gated(want, None) if gate else want, 1e-3)


@pytest.mark.parametrize("counts", SKEWS)
def test_packed(counts: list[int]) -> None:
    rows, groups = sum(counts), len(counts)
    codes = torch.randint(0, 16, (groups, 512, 1536), device=DEVICE)
    exponents = torch.randint(118, 124, (groups, 512, 48), device=DEVICE)
    weight = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=DEVICE)
    wide = torch.cat((table, -table))[codes] * (2.0 ** (exponents.double() - 127)).repeat_interleave(32, -1)
    x, cu_rows = torch.randn(rows + 9, 1536, device=DEVICE).bfloat16(), [0, *itertools.accumulate(counts)]
    x[-9:] = torch.nan
    offsets = torch.tensor(cu_rows, dtype=torch.int32, device=DEVICE)
    arrays = (x, weight, None, exponents.to(torch.uint8), offsets)
    out = tsmla_bridge.grouped_block_scaled_matmul(*arrays, out_dtype=torch.float32, implementation="cute")
    assert not out[-9:].any()
    for group, (begin, end) in enumerate(itertools.pairwise(cu_rows)):
        if begin < end:
            close(out[begin:end], x[begin:end].double() @ wide[group].T, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", SKEWS)
def test_weights_of_16_bits(counts: list[int], dtype: torch.dtype) -> None:
    rows, groups = sum(counts), len(counts)
    x, weight = (torch.randn(*size, 1488, device=DEVICE).to(dtype) for size in ((rows + 9,), (groups + 1, 512)))
    x[-9:], weight[-1] = torch.nan, torch.nan
    cu_rows = [0, *itertools.accumulate(counts)]
    arrays = (x, weight, None, None, torch.tensor(cu_rows, dtype=torch.int32, device=DEVICE))
    picks = torch.randint(0, rows, (rows + 3,), dtype=torch.int32, device=DEVICE)
    form = {"out_dtype": torch.float32, "implementation": "cute"}
    out = tsmla_bridge.grouped_block_scaled_matmul(*arrays, **form)
    picked = tsmla_bridge.grouped_block_scaled_matmul(*arrays, rows=picks, gated=True, limit=4.0, **form)
    narrow = restored(tsmla_bridge.grouped_block_scaled_matmul(
        *arrays, rows=picks, gated=True, limit=4.0, **form | {"out_dtype": torch.float8_e4m3fn}
    ))  # fmt: skip
    assert not out[-9:].any() and not picked[-3:].any() and not narrow[-3:].any()
    for group, (begin, end) in enumerate(itertools.pairwise(cu_rows)):
        if begin < end:
            own, columns = x[picks[begin:end].long()].double(), weight[group].double()
            close(out[begin:end], x[begin:end].double() @ columns.T, 2e-6)
            # The sigmoid's exponent is rounded to float32: 3.6e-6 on an H200.
            close(picked[begin:end], gated(own @ columns.T, 4.0), 6e-6)
            close(narrow[begin:end], gated(own @ columns.T, 4.0), 0.04)


def test_a_stack_of_more_than_2_to_the_31_weights() -> None:
    x, of_x, of_weight = numbers(40, 4096), scales(40, 32), scales(160, 32, 32)
    weight, offsets = numbers(160, 4096, 4096), [0] * 100 + [7] * 59 + [7, 40]
    cu_rows = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    out = tsmla_bridge.grouped_block_scaled_matmul(x, weight, of_x, of_weight, cu_rows, implementation="cute")
    for group, rows in ((99, slice(0, 7)), (159, slice(7, 40))):
        close(out[rows], product(x[rows], weight[group], of_x[rows], of_weight[group]), 2.5e-3)


def test_counts_change_under_a_captured_graph() -> None:
    x, of_x, weight, of_weight = numbers(64, 512), scales(64, 4), numbers(4, 256, 512), scales(4, 2, 4)
    cu_rows = torch.tensor([0, 16, 32, 48, 64], dtype=torch.int32, device=DEVICE)
    out = torch.empty(64, 256, dtype=torch.bfloat16, device=DEVICE)

    def call() -> None:
        tsmla_bridge.grouped_block_scaled_matmul(x, weight, of_x, of_weight, cu_rows, out=out, implementation="cute")

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    cu_rows.copy_(torch.tensor([0, 0, 60, 60, 64], dtype=torch.int32))
    graph.replay()
    close(out[:60], product(x[:60], weight[1], of_x[:60], of_weight[1]), 2.5e-3)
    close(out[60:], product(x[60:], weight[3], of_x[60:], of_weight[3]), 2.5e-3)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("rows", "terms"), [(1, 7168), (33, 1488), (4096, 2048)])
def test_quantised_blocks(rows: int, terms: int, power_of_two: bool) -> None:
    x = (torch.randn(rows, terms, device=DEVICE) * torch.logspace(-9, 4, rows, device=DEVICE)[:, None]).bfloat16()
    values, of_x = tsmla_bridge.quantize_blocks(x, power_of_two=power_of_two, implementation="cute")
    want, factors = tsmla_bridge.quantize_blocks(x, power_of_two=power_of_two, implementation="reference")
    assert torch.equal(of_x, factors)
    assert (values.view(torch.uint8) == want.view(torch.uint8)).float().mean() > 0.999
