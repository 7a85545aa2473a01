"""indexer_topk on torch tensors: as tsmla_jax defines it, and by chunks of two kernels on the stand-in for the GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import tsmla_bridge
import tsmla_jax
from tests.bridge.inputs import tensor, tensors_of
from tests.emulator.launcher import Gpu
from tsmla_bridge.ops import indexer_topk as module
from tsmla_kernels.topk import chunks

HEADS, DIM, P, Z, M, T, K = 8, 128, 7, 16, 3, 23, 6
OFFSETS, LENS = (0, 5, 5, 20, 22), (9, 5, 2, M * Z)  # a request without tokens, one with fewer keys, a row of none


def problem(ragged: bool, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Arguments as numpy and jax arrays. Many scores tie: they are sums of small integers. What no token may read is a
    page of NaN, or an illegal page."""
    rng = np.random.default_rng(3)
    rows = len(LENS) if ragged else T
    lens = np.asarray(LENS) if ragged else rng.integers(0, M * Z + 1, T)
    used = np.arange(M) < -(-lens[:, None] // Z)
    unused = rng.choice([-1, P - 1, np.iinfo(np.int32).max], (rows, M))
    keys = rng.integers(-1, 2, (P, Z, DIM)).astype(np.float32)
    keys[-1] = np.nan
    given: dict[str, Any] = {
        "q": jnp.asarray(rng.integers(-2, 3, (T, HEADS, DIM)), dtype),
        "weights": rng.integers(-1, 2, (T, HEADS)).astype(np.float32),
        "k_cache": jnp.asarray(keys, dtype),
        "block_tables": np.where(used, rng.integers(0, P - 1, (rows, M)), unused).astype(np.int32),
        "seq_lens": lens.astype(np.int32),
    }
    return given | ({"cu_seqlens_q": np.asarray(OFFSETS, np.int32)} if ragged else {})


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of eight rows."""
    monkeypatch.setattr(chunks, "WORKSPACE_BYTES", 9 * 4 * M * Z)
    monkeypatch.setattr(chunks, "ROW_MULTIPLE", 4)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("ragged", [False, True])
def test_as_jax_defines_it(ragged: bool) -> None:
    given = problem(ragged)
    slots, scores, bits = ({name: True} for name in ("return_slots", "return_scores", "return_bits"))
    for options in (slots, scores, slots | scores, bits):
        want = jax.jit(functools.partial(tsmla_jax.indexer_topk, k=K, implementation="xla", **options))(**given)
        got = tsmla_bridge.indexer_topk(**tensors_of(given), k=K, **options)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("return_scores", [False, True])
@pytest.mark.parametrize("return_slots", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_chunks_go_to_the_catalogs_kernels(gpu: Gpu, ragged: bool, return_slots: bool, return_scores: bool) -> None:
    given = tensors_of(problem(ragged, jnp.float8_e4m3fn))
    options: dict[str, Any] = {"k": K, "return_slots": return_slots, "return_scores": return_scores}
    want = tsmla_bridge.indexer_topk(**given, **options, implementation="reference")
    assert not gpu.launches
    workspace = tsmla_bridge.Workspace(tsmla_bridge.indexer_topk_workspace_size(max_tokens=T, max_keys=M * Z), "cpu")
    out, counts = torch.empty(T, K, dtype=torch.int32), torch.empty(T, dtype=torch.int32)
    memory: dict[str, Any] = {"out": out, "workspace": workspace} | ({"counts": counts} if return_slots else {})
    memory |= {"scores": torch.empty(T, K)} if return_scores else {}
    several = return_slots or return_scores
    for places in ({}, memory):
        gpu.launches.clear()
        got = tsmla_bridge.indexer_topk(**given, **options, **places)
        for one, other in zip(got, want, strict=True) if several else ((got, want),):
            assert torch.equal(one, other)
        assert len(gpu.launches) == 6  # of three chunks; the last one shares a row with the one before
        assert {operands["logits"].shape for _, operands in gpu.launches} == {(8, M * Z)}
    assert got is out or (got[0] is out and got[-1] is memory["scores" if return_scores else "counts"])
    assert {operands["logits"].data_ptr() for _, operands in gpu.launches} == {workspace.buffer.data_ptr()}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("returned", ["return_slots", "return_scores", "return_bits"])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_topk_kernel_takes_logits_of_torch_operations(gpu: Gpu, ragged: bool, returned: str) -> None:
    """The kernel of the logits takes no keys of bf16."""
    given, options = tensors_of(problem(ragged, jnp.bfloat16)), {returned: True}
    want = tsmla_bridge.indexer_topk(**given, k=K, **options, implementation="reference")
    assert not gpu.launches
    got = tsmla_bridge.indexer_topk(**given, k=K, **options)
    assert len(gpu.launches) == 3  # of three chunks
    for one, other in zip(got, want, strict=True) if isinstance(got, tuple) else ((got, want),):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("small_chunks")
def test_bits_go_to_given_memory(gpu: Gpu) -> None:
    given = tensors_of(problem(True, jnp.float8_e4m3fn))
    want = tsmla_bridge.indexer_topk(**given, k=K, return_bits=True, implementation="reference")
    out = torch.empty(T, 4, dtype=torch.int32)
    assert tsmla_bridge.indexer_topk(**given, k=K, return_bits=True, out=out) is out
    assert torch.equal(out, want) and len(gpu.launches) == 6
    with pytest.raises(ValueError, match=rf"out: got int32\[{T}, {K}\]; legal: int32\[{T}, 4\]"):
        tsmla_bridge.indexer_topk(**given, k=K, return_bits=True, out=out.new_empty(T, K))


@pytest.mark.parametrize("tokens", [0, 1])
def test_scores_of_no_keys_are_float32(tokens: int) -> None:
    weights, tables = torch.zeros(tokens, 8, dtype=torch.float64), torch.zeros(tokens, 0, dtype=torch.int32)
    q, lens = torch.zeros(tokens, 8, 16), torch.zeros(tokens, dtype=torch.int32)
    _, scores = tsmla_bridge.indexer_topk(q, weights, torch.zeros(1, 4, 16), tables, lens, 2, return_scores=True)
    assert scores.dtype == torch.float32 and torch.equal(scores, torch.full((tokens, 2), -torch.inf))


class Operations(TorchDispatchMode):
    """Records the names of the torch operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("flags", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("ragged", [False, True])
def test_nothing_is_launched_beside_the_kernels(gpu: Gpu, ragged: bool, flags: tuple[bool, bool]) -> None:
    given = tensors_of(problem(ragged, jnp.float8_e4m3fn))
    offsets = given.pop("cu_seqlens_q", None)
    gpu.runs = False
    with Operations() as seen:  # the public function would be one operator under it
        module._select(module.Call(*given.values(), offsets, K, *flags, False, None), module.Memory())
    assert len(gpu.launches) == 6
    assert seen.names <= {"empty", "new_empty", "view", "slice", "split", "detach"}  # memory and views alone


def test_rows_say_their_keys_and_requests(gpu: Gpu) -> None:
    given = tensors_of(problem(True, jnp.float8_e4m3fn))
    workspace = tsmla_bridge.Workspace(tsmla_bridge.indexer_topk_workspace_size(max_tokens=T, max_keys=M * Z), "cpu")
    tsmla_bridge.indexer_topk(**given, k=K, return_slots=True, workspace=workspace)
    (_, logits), (_, topk) = gpu.launches
    requests, lens = topk["row_requests"].tolist(), topk["seq_lens"].tolist()
    assert requests[:22] == [0] * 5 + [2] * 15 + [3] * 2
    assert lens == [*range(5, 10), *[0] * 13, 1, 2, M * Z - 1, M * Z, 0]  # the last row is of no request
    assert topk["seq_lens"].data_ptr() == logits["row_lens"].data_ptr()
    assert topk["block_tables"].data_ptr() == given["block_tables"].data_ptr()


def test_one_chunk_reads_the_tensors_themselves(gpu: Gpu) -> None:
    given = tensors_of(problem(True, jnp.float8_e4m3fn))
    want = tsmla_bridge.indexer_topk(**given, k=K, implementation="reference")
    assert torch.equal(tsmla_bridge.indexer_topk(**given, k=K), want)
    (_, logits), _ = gpu.launches
    assert all(logits[name].data_ptr() == given[name].data_ptr() for name in given)


def test_as_an_operator() -> None:
    given = tensors_of(problem(ragged=True))  # opcheck can't compare float8
    arguments = (*given.values(), K, True, True, False, None)
    memory = (torch.zeros(T, K, dtype=torch.int32), torch.zeros(T, dtype=torch.int32), torch.zeros(T, K), None)
    torch.library.opcheck(module.topk_operator, arguments)
    torch.library.opcheck(module.topk_into_operator, (*arguments, *memory))
    compiled = torch.compile(tsmla_bridge.indexer_topk, backend="eager", fullgraph=True)
    options: dict[str, Any] = {"k": K, "return_slots": True, "return_scores": True}
    for places in ({}, {"out": memory[0], "counts": memory[1]}):
        got = compiled(**given, **options, **places)
        for one, other in zip(got, tsmla_bridge.indexer_topk(**given, **options), strict=True):
            assert torch.equal(one, other)


def test_scores_have_a_derivative_in_torch_operations(gpu: Gpu) -> None:
    given = tensors_of(problem(False, jnp.float8_e4m3fn))
    positions, plain = tsmla_bridge.indexer_topk(**given, k=K, return_scores=True)
    launches = len(gpu.launches)
    weights = given["weights"].clone().requires_grad_()
    _, scores = tsmla_bridge.indexer_topk(**(given | {"weights": weights}), k=K, return_scores=True)
    assert len(gpu.launches) == launches and torch.equal(scores, plain)
    scores[positions >= 0].sum().backward()
    logits = tsmla_bridge.indexer_logits(**(given | {"weights": weights}), implementation="reference")
    (want,) = torch.autograd.grad(logits.gather(1, positions.clamp(min=0).long())[positions >= 0].sum(), weights)
    assert weights.grad is not None and torch.allclose(weights.grad, want) and want.any()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given["weights"], torch.ones_like(want))
        _, scores = tsmla_bridge.indexer_topk(**(given | {"weights": dual}), k=K, return_scores=True)
        tangent = forward_ad.unpack_dual(scores).tangent
    assert tangent is not None and torch.allclose(tangent[positions >= 0].sum(), want.sum())
    with pytest.raises(NotImplementedError, match="a derivative is asked for; the kernels have none"):
        tsmla_bridge.indexer_topk(**(given | {"weights": weights}), k=K, return_scores=True, implementation="cute")
    tsmla_bridge.indexer_topk(**(given | {"weights": weights}), k=K, implementation="cute")


@pytest.mark.parametrize(
    "change",
    [
        {"q": np.zeros((7, HEADS, DIM), np.float32)},
        {"seq_lens": np.zeros(4, np.float32)},
        {"cu_seqlens_q": np.zeros(4, np.int32)},
        {"k": 0},
        {"q": None},
        {"block_tables": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_both_front_ends_say_the_same(change: dict[str, Any]) -> None:
    given = problem(ragged=True) | {"k": K} | change
    with pytest.raises((TypeError, ValueError)) as theirs:
        tsmla_jax.indexer_topk(**given)
    with pytest.raises(theirs.type) as ours:
        tsmla_bridge.indexer_topk(**{n: v if v is None or n == "k" else tensor(v) for n, v in given.items()})
    assert str(ours.value) == str(theirs.value).replace("legal: an array", "legal: a torch.Tensor")


def test_what_is_refused() -> None:
    given = tensors_of(problem(ragged=False))
    with pytest.raises(NotImplementedError, match=r"^indexer_topk: implementation='cute'.*the tensors are on cpu"):
        tsmla_bridge.indexer_topk(**given, k=K, implementation="cute")
    with pytest.raises(ValueError, match=r"out: got int32\[7, 3\]; legal: int32\[23, 6\]"):
        tsmla_bridge.indexer_topk(**given, k=K, out=torch.empty(7, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="scores: got a tensor without return_scores"):
        tsmla_bridge.indexer_topk(**given, k=K, scores=torch.empty(T, K))
    with pytest.raises(ValueError, match=r"scores: got int32\[23, 6\]; legal: float32\[23, 6\]"):
        wrong = torch.empty(T, K, dtype=torch.int32)
        tsmla_bridge.indexer_topk(**given, k=K, return_scores=True, scores=wrong)
    with pytest.raises(ValueError, match="counts: got a tensor without return_slots"):
        tsmla_bridge.indexer_topk(**given, k=K, counts=torch.empty(T, dtype=torch.int32))


def test_a_workspace_too_small_is_refused(gpu: Gpu) -> None:
    given = tensors_of(problem(False, jnp.float8_e4m3fn))
    with pytest.raises(ValueError, match="workspace: got 16 bytes; this call of indexer_topk needs 4416"):
        tsmla_bridge.indexer_topk(**given, k=K, workspace=tsmla_bridge.Workspace(16, "cpu"))
    assert not gpu.launches
