"""Tokens that share gathers: which calls may, what the device finds of a group, and the schedule of both launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import tsmla_bridge
from tests.emulator.ptx import launcher, machine
from tests.emulator.ptx.machine import Order
from tests.emulator.schedule_interpreter import Interpreter
from tests.gpu.small_grid import CALLS, numbers, wrong
from tests.kernels.object_checks import all_but_slow, check_compiled, check_object
from tests.kernels.on_machine import forget
from tests.kernels.sm90.sparse.specs import PLAIN, V4_CALL, V32_CALL
from tests.oracles import sparse_inputs
from tsmla_kernels.catalog import SPARSE_MLA, SPARSE_MLA_UNION
from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.latent.shape import LatentShape
from tsmla_kernels.sm90.sparse.config import MIN_STAGES, SparseConfig
from tsmla_kernels.sm90.sparse.record import serving, workspaces_of
from tsmla_kernels.sm90.sparse.union_config import (
    FEWEST_NEIGHBOURS,
    FEWEST_TOKENS,
    MOST_COLUMNS,
    PARTS,
    WORTH,
    UnionConfig,
    sparse_form,
    union_columns,
    union_config,
    union_reasons,
)

PROMPT = dataclasses.replace(V32_CALL, num_tokens=4096)
BF16_ROWS = dataclasses.replace(PLAIN, dtype="bfloat16", head_dim=576)


@pytest.mark.parametrize(("heads", "tokens"), [(8, 8), (16, 4), (32, 2)])
def test_a_group_has_64_rows(heads: int, tokens: int) -> None:
    config = union_config(dataclasses.replace(PROMPT, num_heads=heads))
    assert config.tokens == tokens and config.shared.shape.p_rows == 64 and config.alone.shape.p_rows == max(heads, 16)
    assert config.shared.shape.max_tiles == 1 and config.shared.stages >= MIN_STAGES
    assert config.shared.lengths and config.alone.lengths and not config.lengths and config.shared.dealt


def test_rows_of_16_bits_leave_room_for_32() -> None:
    spec = dataclasses.replace(PROMPT, cache=BF16_ROWS)
    assert union_config(spec).tokens == 2 and union_config(spec).shared.stages >= MIN_STAGES
    assert "8 or 16 heads" in union_reasons(dataclasses.replace(spec, num_heads=32))[0]
    narrow = dataclasses.replace(spec, cache=dataclasses.replace(BF16_ROWS, head_dim=512), head_dim=512)
    assert union_config(narrow).tokens == 4 and union_config(narrow).shared.stages >= MIN_STAGES


REFUSED: dict[str, dict[str, Any]] = {
    "q.dtype": {"q_dtype": FP8},
    "num_heads is 64": {"num_heads": 64},
    "batch_invariant": {"batch_invariant": True},
    "columns": {"num_selected": MOST_COLUMNS + 1},
    "two plain caches": {"cache": PLAIN, "compressed": PLAIN, "head_dim": 512},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_calls_whose_tokens_cannot_share(reason: str) -> None:
    spec = dataclasses.replace(PROMPT, **REFUSED[reason])
    assert reason in union_reasons(spec)[0]
    assert sparse_form(spec).name == "direct" and reason in sparse_form(spec).why
    assert union_reasons(spec) == SPARSE_MLA.reasons(dataclasses.replace(spec, form="union"))
    assert SPARSE_MLA.reasons(spec) == []


@pytest.mark.parametrize(
    ("tokens", "per_request", "form"),
    [
        (FEWEST_TOKENS, 0, "union"),
        (FEWEST_TOKENS - 1, 0, "direct"),
        (FEWEST_TOKENS, 1, "direct"),
        (FEWEST_NEIGHBOURS, 4, "union"),
        (FEWEST_NEIGHBOURS - 4, 4, "direct"),
        ("t", 0, "direct"),
    ],
)
def test_sizes_choose_the_form(tokens: Any, per_request: int, form: str) -> None:
    spec = dataclasses.replace(V32_CALL, num_tokens=tokens, tokens_per_request=per_request)
    assert sparse_form(spec).name == form
    assert ("another request" if per_request == 1 else str(tokens)) in sparse_form(spec).why
    kernel = SPARSE_MLA_UNION if form == "union" else SPARSE_MLA
    assert serving(spec, lengths=True, sinks=False).kernel is kernel
    for named in ("direct", "union"):
        assert sparse_form(dataclasses.replace(spec, form=named)).name == named


def test_the_workspaces_of_a_prompt() -> None:
    shapes = workspaces_of(union_config(PROMPT), 132, 4096, 2048)
    assert shapes["union_slots"] == ((1024, union_columns(4, 2048)), "int32")
    assert union_columns(4, 2048) == 4352 and union_columns(2, 70) == 128
    assert shapes["union_partial_out"][0][0] == shapes["partial_out"][0][0] == 264
    names = [operand.name for operand in SPARSE_MLA_UNION.operands(union_config(PROMPT)) if operand.output]
    assert names == ["out", "lse", *shapes]


def test_options_describe_the_same_configuration() -> None:
    assert SPARSE_MLA_UNION.from_options({"num_heads": "16"}) == union_config(PROMPT)
    with pytest.raises(ValueError, match="num_heads is 128"):
        SPARSE_MLA_UNION.from_options({"num_heads": "128"})
    prompt = {"num_heads": "16", "num_tokens": "4096"}
    assert SPARSE_MLA.objects_for(prompt) == ((SPARSE_MLA_UNION, union_config(PROMPT)),)
    ((kernel, _),) = SPARSE_MLA.objects_for(prompt | {"tokens_per_request": "1"})
    assert kernel is SPARSE_MLA
    spec = dataclasses.replace(V4_CALL, num_heads=16)
    options = {"num_heads": "16", "layout": "v4", "window": "128", "compressed_page_size": "2", "sinks": "true"}
    assert SPARSE_MLA_UNION.from_options(options) == union_config(spec, sinks=True)


CONFIGS = {
    "16 heads": {"num_heads": "16"},
    "8 heads, lengths, sinks": {"num_heads": "8", "lengths": "true", "sinks": "true"},
    "32 heads, f16, gaps between pages": {"num_heads": "32", "dtype": "float16", "page_span": "72"},
    "V4, two caches, sinks, 16 heads": {"num_heads": "16", "layout": "v4", "window": "128", "sinks": "true"},
    "V4, two caches, 8 heads, lengths": {
        "num_heads": "8",
        "layout": "v4",
        "window": "128",
        "compressed_page_size": "32",
        "lengths": "true",
    },
    "bf16, D 576, 16 heads": {"num_heads": "16", "layout": "plain"},
    "bf16, D 576, 8 heads": {"num_heads": "8", "layout": "plain"},
    "f16, D 512, 32 heads": {"num_heads": "32", "layout": "plain", "dtype": "float16", "head_dim": "512"},
    "e4m3, D 576, 16 heads": {"num_heads": "16", "layout": "plain", "kv_dtype": FP8},
}


@pytest.mark.parametrize("name", all_but_slow(CONFIGS, () if machine.COMPILER else ("16 heads",)))
def test_everything_stays_in_registers(name: str) -> None:
    check_compiled(SPARSE_MLA_UNION, SPARSE_MLA_UNION.from_options(CONFIGS[name]), kernels=5)


# ---- the schedule


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return Interpreter()


def covered(shape: LatentShape, lens: np.ndarray, pieces: list[Any], split_info: np.ndarray) -> None:
    """Requests of this launch are done once, the others are not; an entry of split_info has its tile's rows."""
    of_request: dict[int, list[Any]] = {}
    for piece in pieces:
        of_request.setdefault(piece.request, []).append(piece)
        assert piece.row == 0
        if piece.slot >= 0:
            assert split_info[piece.slot, 0] == piece.request * shape.max_q_len * shape.num_heads
    assert sorted(of_request) == list(np.flatnonzero(lens >= 0))
    for r, parts in of_request.items():
        parts.sort(key=lambda piece: piece.begin)
        ends = [piece.end for piece in parts]
        assert [piece.begin for piece in parts] == [0, *ends[:-1]] and ends[-1] == max(-(-lens[r] // shape.block), 1)
    slots = [piece.slot for piece in pieces if piece.slot >= 0]
    assert sorted(slots) == list(np.flatnonzero(split_info[:, 3]))


@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("count", "shares"), [(7, 0.5), (90, 1.0), (90, 0.5), (90, 0.03), (90, 0.0), (700, 0.9)])
@pytest.mark.sampled(5)
def test_requests_of_another_launch_are_left_out(
    interpreter: Interpreter, count: int, shares: float, tokens: int, dealt: bool
) -> None:
    shape = SparseConfig("bfloat16", 16, lengths=True, tokens=tokens, skips=True).shape
    rng = np.random.default_rng(count)
    lens = rng.integers(0, 3000, count)
    lens = np.where(rng.random(count) < shares, lens, -1 - lens)
    covered(shape, lens, *interpreter.run(shape, 20, lens, 3000, dealt=dealt))


# ---- the unions


def union_of(slots: np.ndarray) -> tuple[list[int], list[int]]:
    """The union of the rows, and its bits: the first row's slots, then the second row's others, and so on."""
    bits: dict[int, int] = {}
    for i, row in enumerate(slots):
        for slot in row[row >= 0].tolist():
            bits[slot] = bits.get(slot, 0) | 1 << i
    return list(bits), list(bits.values())


@pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_groups_that_share_and_groups_that_do_not(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group whose tokens select the same slots, one with slots of its own for each token, one with a slot twice in
    a row, one with little in common, and one of a single token without slots. In bfloat16 the object is that of "16
    heads" below, and it is checked here, as compiling it takes ten seconds."""
    forget()
    made = sparse_inputs.call("v32", tokens=17, heads=16, selected=90, pages=60, lengths=False, dtype=dtype, together=4)
    arrays = {name: array.copy() for name, array in made.arrays.items()}
    indices, rng = arrays["indices"], np.random.default_rng(5)
    few = np.unique(indices[indices >= 0])
    indices[4:8] = np.stack([rng.permutation(few)[:90] for _ in range(4)])
    for i in range(4):  # 22 slots for each token, of which no other has one
        indices[4 + i] = -1
        indices[4 + i, :22] = few[22 * i : 22 * (i + 1)]
    indices[8, 1] = indices[8, 0] = few[0]
    indices[12:16, :60] = -1
    indices[16] = -1
    tensors = {name: numbers(array) for name, array in arrays.items()}
    options = made.options | {"return_lse": True, "form": "union"}
    cpu = torch.device("cpu")
    call = next(iter(CALLS["sparse_mla"](torch.Generator())))._replace(
        name="groups", function=tsmla_bridge.sparse_mla, tensors=tensors, options=options
    )
    want = call.on(cpu)
    forget()
    gpu = launcher.install(monkeypatch)
    monkeypatch.setattr(launcher.EmulatedLauncher, "order", Order(7, 2))
    memory = tsmla_bridge.Workspace.of(torch.empty(1 << 27, dtype=torch.uint8))
    got = call._replace(options=options | {"workspace": memory}).on(cpu)
    assert wrong(call, got, want) == [] and launcher.EmulatedLauncher.hazards == []
    found = {name: x.clone() for name, x in gpu.launches[-1][1].items() if name.startswith(("union_", "token_"))}
    lengths = found["union_lengths"].tolist()
    for group in range(5):
        rows = indices[4 * group : 4 * group + 4]
        slots, bits = union_of(rows)
        entered = int((rows >= 0).sum())
        twice = any(len(np.unique(row[row >= 0])) < (row >= 0).sum() for row in rows)
        if twice or len(slots) * PARTS > entered * WORTH[4]:
            assert lengths[group] == -1
        else:
            assert lengths[group] == len(slots)
            assert found["union_slots"][group, : len(slots)].tolist() == slots
            assert found["union_bits"][group, : len(slots)].tolist() == bits
    assert [n >= 0 for n in lengths] == [True, False, False, lengths[3] >= 0, True]
    shared = np.repeat([n >= 0 for n in lengths], 4)[:17]
    assert found["token_lengths"].tolist() == [-91 if shares else 90 for shares in shared]
    if dtype == "bfloat16":
        key = (SPARSE_MLA_UNION.name, SPARSE_MLA_UNION.config_json(union_config(PROMPT)), launcher.HOPPER)
        check_object(launcher.EmulatedLauncher.compiled[key].compiled, kernels=5)


@pytest.mark.slow
@pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine")
def test_groups_that_are_known_by_a_quarter_of_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens with slots of their own, tokens with the same slots, and tokens of which each shares 80 % with the one
    before; more slots than the bitmap's doubt is about."""
    forget()
    made = sparse_inputs.call("v32", tokens=12, heads=16, selected=640, pages=500, lengths=False, dtype="bfloat16")
    arrays = {name: array.copy() for name, array in made.arrays.items()}
    rng, indices = np.random.default_rng(6), arrays["indices"]
    usable = np.unique(indices[indices >= 0])
    assert len(usable) >= 3000
    indices[:4] = rng.permutation(usable)[: 4 * 640].reshape(4, 640)
    indices[4:8] = rng.permutation(usable)[:640]
    indices[8] = rng.permutation(usable)[:640]
    for token in (9, 10, 11):
        kept = rng.permutation(indices[token - 1])[:512]
        indices[token] = [*kept, *rng.permutation(np.setdiff1d(usable, indices[token - 1]))[:128]]
    tensors = {name: numbers(array) for name, array in arrays.items()}
    options = made.options | {"return_lse": True, "form": "union"}
    cpu = torch.device("cpu")
    call = next(iter(CALLS["sparse_mla"](torch.Generator())))._replace(
        name="groups", function=tsmla_bridge.sparse_mla, tensors=tensors, options=options
    )
    want = call.on(cpu)
    forget()
    gpu = launcher.install(monkeypatch)
    memory = tsmla_bridge.Workspace.of(torch.empty(1 << 27, dtype=torch.uint8))
    got = call._replace(options=options | {"workspace": memory}).on(cpu)
    assert wrong(call, got, want) == [] and launcher.EmulatedLauncher.hazards == []
    lengths = gpu.launches[-1][1]["union_lengths"].tolist()
    assert lengths == [-1, 640, len(np.unique(indices[8:]))]


def test_a_configuration_is_of_plain_fields() -> None:
    config = union_config(PROMPT)
    assert SPARSE_MLA_UNION.config_from_fields(dataclasses.asdict(config)) == config == UnionConfig("bfloat16", 16)
