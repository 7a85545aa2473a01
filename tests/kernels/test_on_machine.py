"""The compiled Hopper kernels run on the machine of tests/emulator/ptx: the bridge's calls, their host code and PTX,
against the reference on the CPU. Warps run and copies arrive in several random orders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

import tsmla_bridge
from tests.emulator.ptx import launcher, machine
from tests.emulator.ptx.machine import Order
from tests.gpu.small_grid import CALLS, Call, int32, wrong
from tests.kernels.object_checks import check_object
from tests.kernels.on_machine import MASKED_KEYS, forget
from tsmla_kernels.catalog import SELECT_TOPK
from tsmla_kernels.topk import chunks

pytestmark = pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine")

ORDERS = tuple(Order(seed, resident) for seed, resident in enumerate((4, 1, 2)))

FAST = {
    "block_scaled_matmul": ("7 rows", "groups of [0, 3", "blocks of 3"),
    "compress_write_kv_cache": ("v4 4 overlapping", "v4 128 overlapping", "indexer 4 overlapping"),
    "gated_block_scaled_matmul": ("gated 7 rows", "gated picked groups of [0, 1"),
    "kv_cache": ("write torch.bfloat16", "gather torch.float8_e4m3fn"),
    "merge_attention_states": ("torch.bfloat16",),
    "mla_prefill": (
        "torch.float8_e4m3fn [130, 1] over [131, 64] causal",
        "256 and 256 torch.bfloat16 [70, 0, 5] over [70, 30, 200] causal selected",
    ),
    "mla_prefill_sinks_gradient": (
        "torch.bfloat16 [3, 1] over [0, 2] causal deterministic far sinks",
        "torch.bfloat16 [3, 1] over [0, 2] causal deterministic sinks at",
        "torch.bfloat16 [3, 1] over [0, 2] causal sinks at",
    ),
    "mla_prefill_selection": ("torch.float8_e4m3fn [130, 1] over [300, 64] causal",),
    "packed_block_scaled_matmul": ("packed 7 rows", "packed gated groups of [0, 3, 0, 0, 9, 1] torch.bfloat16"),
    "packed_caches": ("rows 1 torch.bfloat16 rotated", "keys 1 torch.bfloat16", "queries 1 torch.bfloat16"),
    "plain_grouped_matmul": ("gated groups of [0, 3, 0, 65, 1] torch.float32", "groups of [250"),
    "select_topk": ("3001 bits from their starts",),
    "selection_bits": ("77 lengths starts",),
    "sparse_mla": (
        "{'layout': 'v32', 'heads': 16, 'selected': 300, 'tokens': 5}",
        "{'layout': 'v4', 'heads': 64, 'selected': 192, 'window': 128",
        "rising logits H 16",
    ),
    "sparse_mla_gradient": ("bfloat16 {'heads': 5,",),
}
"""Calls of every run of the tests, by the beginning of their names: compiling takes a second, or ten for attention."""


FOR_ALL_ARCHITECTURES = (
    "compress_write_kv_cache",
    "kv_cache",
    "merge_attention_states",
    "packed_caches",
    "select_topk",
    "selection_bits",
)
"""The calls of kernels that are compiled for Blackwell, too."""


def calls(ops: Iterable[str]) -> list[Any]:
    found = []
    for op in ops:
        for call in CALLS[op](torch.Generator().manual_seed(0)):
            fast = call.name.startswith(FAST.get(op, ())) and "invariant" not in call.name
            found.append(pytest.param(call, id=f"{op} {call.name}", marks=() if fast else pytest.mark.slow))
    return found


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Before a test, and behind it: what the emulated machine was given serves no other test."""
    forget()
    yield
    forget()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Drawing the inputs takes seconds: those of all operations only where slow tests may be wanted."""
    if "call" in metafunc.fixturenames:
        wanted = FAST if metafunc.config.option.markexpr == "not slow" else CALLS
        every = "arch" in metafunc.fixturenames
        metafunc.parametrize("call", calls(op for op in wanted if op in FOR_ALL_ARCHITECTURES or not every))


def test_compiled_kernels_agree_with_the_reference(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    want = call.on(cpu)
    forget()
    gpu = launcher.install(monkeypatch)
    before = set(launcher.EmulatedLauncher.compiled)
    for order in ORDERS:
        monkeypatch.setattr(launcher.EmulatedLauncher, "order", order)
        got = call.on(cpu)
        assert wrong(call, got, want) == []
    assert len(gpu.launches) >= len(ORDERS)
    assert [hazard for hazard in launcher.EmulatedLauncher.hazards if not MASKED_KEYS.match(hazard)] == []
    for key in launcher.EmulatedLauncher.compiled.keys() - before:
        emulated = launcher.EmulatedLauncher.compiled[key]
        check_object(emulated.compiled, kernels=len(emulated.programs))


@pytest.mark.parametrize(
    "arch", ["sm_100a", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_103a", "sm_120a"))]
)
def test_kernels_of_all_architectures_on_a_machine_of_blackwells(
    call: Call, arch: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Their code for Blackwell uses no instruction that the machine doesn't know, so it runs there; and has no spills.
    The top-k alone does not fit sm_120a."""
    if arch not in SELECT_TOPK.archs and request.node.callspec.id.startswith("select_topk"):
        pytest.skip(f"the top-k is not written for {arch}")
    cpu = torch.device("cpu")
    want = call.on(cpu)
    forget()
    gpu = launcher.install(monkeypatch, arch)
    before = set(launcher.EmulatedLauncher.compiled)
    assert wrong(call, call.on(cpu), want) == []
    assert gpu.launches and launcher.EmulatedLauncher.hazards == []
    assert {key[-1] for key in launcher.EmulatedLauncher.compiled} >= {arch}
    for key in launcher.EmulatedLauncher.compiled.keys() - before:
        check_object(launcher.EmulatedLauncher.compiled[key].compiled, kernels=1)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["mla_prefill_gradient", "mla_prefill_wide_gradient"])
def test_a_gradient_of_whole_tiles_has_no_hazards(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows are zeroed where requests end with a tile, so not even the hazards of MASKED_KEYS are there."""
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    drawn = next(call for call in CALLS[op](generator) if call.name.endswith("[130, 1] over [131, 64] causal"))
    rows = {"q": 256, "k": 384, "v": 384, "dout": 256, "dlse": 256}
    tensors = {
        name: torch.randn(count, 2, *drawn.tensors[name].shape[2:], generator=generator).to(drawn.tensors[name].dtype)
        for name, count in rows.items()
    }
    tensors |= {"cu_seqlens_q": int32([0, 192, 256]), "cu_seqlens_kv": int32([0, 256, 384])}
    call = drawn._replace(tensors=tensors, options=drawn.options | {"max_q_len": 192, "max_kv_len": 256})
    want = call.on(cpu)
    forget()
    launcher.install(monkeypatch)
    for order in ORDERS[:2]:
        monkeypatch.setattr(launcher.EmulatedLauncher, "order", order)
        assert wrong(call, call.on(cpu), want) == []
    assert launcher.EmulatedLauncher.hazards == []


@pytest.mark.slow
@pytest.mark.parametrize("uneven", [False, True])
def test_the_bits_of_a_deterministic_sparse_gradient(uneven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run in other orders and add to the same keys. If all heads of a token with great cotangents look at
    one key, what they add to it is carried to the second sums."""
    call = deterministic_sparse_gradient()
    if uneven:
        slot = int(call.tensors["indices"][0].max())
        key = call.tensors["kv_cache"].flatten(0, 1)[slot].float()
        steep = key * 20 / (key.square().sum() * call.options["softmax_scale"])
        q, d_out = (call.tensors[name].clone() for name in ("q", "dout"))
        q[0] = steep.to(q.dtype)
        d_out[0] *= 64
        call = call._replace(tensors=call.tensors | {"q": q, "dout": d_out})
    want = call.on(torch.device("cpu"))
    forget()
    gpu = launcher.install(monkeypatch)
    found = []
    for order in ORDERS:
        monkeypatch.setattr(launcher.EmulatedLauncher, "order", order)
        found.append(call.on(torch.device("cpu")))
        assert gpu.operands["kv_carry"].any() == uneven
    assert wrong(call, found[0], want) == []
    for results in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results, found[0], strict=True))


@pytest.mark.slow
def test_a_cotangent_that_is_not_finite_in_a_deterministic_sparse_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the keys of its token, and no others."""
    call, cpu = deterministic_sparse_gradient(), torch.device("cpu")
    want = call.on(cpu)
    indices, lengths = call.tensors["indices"], call.tensors["lengths"]
    token = int(lengths.argmax())
    d_out = call.tensors["dout"].clone()
    d_out[token, 7, 20] = torch.inf
    forget()
    launcher.install(monkeypatch)
    _, found, *_ = call._replace(tensors=call.tensors | {"dout": d_out}).on(cpu)
    reached = torch.zeros(found.shape[0] * found.shape[1], dtype=torch.bool)
    reached[[slot for slot in indices[token, : lengths[token]].tolist() if 0 <= slot < len(reached)]] = True
    rows = found.flatten(0, 1)
    assert reached.any() and not reached.all()
    assert rows[reached].isnan().all() and rows[~reached].isfinite().all()
    others = want[1].flatten(0, 1)[~reached].float()
    assert (rows[~reached].float() - others).norm() < 2**-7 * others.norm()


def deterministic_sparse_gradient() -> Call:
    name = "deterministic bfloat16 {'heads': 80, "
    (call,) = (x for x in CALLS["sparse_mla_gradient"](torch.Generator().manual_seed(0)) if x.name.startswith(name))
    return call


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"return_slots": True, "return_scores": True}], ids=["positions", "both"])
def test_chunks_of_requests_with_several_tokens(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 32 rows that cut a request in three; the last chunk shares rows with the one before. One request has no
    tokens, one fewer keys than tokens, and two rows are of no request."""
    cpu = torch.device("cpu")
    (call,) = (x for x in CALLS["indexer_topk"](torch.Generator().manual_seed(0)) if x.name == "ragged")
    lens, offsets = ([2, 9, 1200, 7], [0, 3, 3, 69, 72])
    tensors = call.tensors | {"seq_lens": int32(lens), "cu_seqlens_q": int32(offsets)}
    call = call._replace(tensors=tensors, options=call.options | options)
    want = call.on(cpu)
    forget()
    gpu = launcher.install(monkeypatch)
    monkeypatch.setattr(chunks, "WORKSPACE_BYTES", 33 * 4 * 20 * 64)
    for order in ORDERS:
        monkeypatch.setattr(launcher.EmulatedLauncher, "order", order)
        for got, defined in zip(call.on(cpu), want, strict=True):
            assert torch.equal(got, defined)
    assert len(gpu.launches) == 6 * len(ORDERS) and launcher.EmulatedLauncher.hazards == []
    asked = [x["row_lens"].shape[0] for _, x in gpu.launches if "row_lens" in x]
    assert asked == [32, 64, 74] * len(ORDERS)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 4])
def test_a_requests_bits_beside_other_requests(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With batch_invariant, by the one kernel that an engine's steps of one token, or of some drafts, have."""
    launcher.install(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(60, 64, 576, generator=generator).to(torch.bfloat16)
    q = torch.randn(12, 16, 576, generator=generator).to(torch.bfloat16)

    def rows(beside: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        new = [*beside, most]
        tables = torch.arange(20 * len(new), dtype=torch.int32).view(-1, 20).flip(0).contiguous()
        tokens = torch.cat((q[: sum(beside)], q[-most:]))
        options: dict[str, Any] = {"softmax_scale": 0.07, "return_lse": True, "batch_invariant": True}
        if most > 1:
            options |= {"cu_seqlens_q": int32([0, *new]).cumsum(0).to(torch.int32), "max_q_len": most}
        else:
            tokens = tokens[:, None]
        lens = int32([*([70, 1280][: len(beside)]), 700])
        out, lse = tsmla_bridge.mla_decode(tokens, cache, tables, lens, **options)
        return out.view(-1, 16, 512)[-most:], lse.view(-1, 16)[-most:]

    want = rows([])
    for order, beside in zip(ORDERS, ([1], [most], [most, 1]), strict=True):
        monkeypatch.setattr(launcher.EmulatedLauncher, "order", order)
        for got, alone in zip(rows(beside), want, strict=True):
            assert torch.equal(got, alone)
    assert launcher.EmulatedLauncher.hazards == []
