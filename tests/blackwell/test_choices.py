"""Fold, packing, splits and workspace against tokenspeed-mla's own wrapper, over ten thousand random calls.

The wrapper runs on tensors without memory, with its questions to the GPU answered here, up to the compiled kernel's
call: what it asks to be compiled and what it passes is compared with what the adapter chooses.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tsmla_kernels import contract
from tsmla_kernels.sm100 import choose

torch = pytest.importorskip("torch")
upstream = pytest.importorskip("tokenspeed_mla.mla_decode")

DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float16": torch.float16}
CALLS = 10_000


class Call(NamedTuple):
    arch: str
    num_sms: int
    dtype: str
    batch: int
    tokens: int
    heads: int
    page_size: int
    max_pages: int


def random_call(rng: random.Random) -> Call:
    call = Call(
        arch=rng.choice(choose.ARCHS),
        num_sms=rng.choice([78, 132, 148, 152, 160, 224]),
        dtype=rng.choice(list(DTYPES)),
        batch=int(2 ** rng.uniform(0, 10)),
        tokens=rng.choice([1, 1, 2, 3, 4, 5, 6, 7, 8, rng.randint(9, 64)]),
        heads=rng.choice([8, 16, 32, 64, 128, rng.randint(1, 128)]),
        page_size=rng.choice(choose.PAGE_SIZES),
        max_pages=int(2 ** rng.uniform(0, 13)),
    )
    too_large = call.batch * call.tokens * call.heads * choose.LATENT_DIM >= choose.MAX_ELEMENTS
    return random_call(rng) if too_large else call


def spec_of(call: Call) -> contract.DecodeSpec:
    array = contract.Array
    return contract.decode_spec(
        q=array((call.batch, call.tokens, call.heads, 576), call.dtype),
        kv_cache=array((8, call.page_size, 576), call.dtype),
        block_tables=array((call.batch, call.max_pages), "int32"),
        seq_lens=array((call.batch,), "int32"),
        softmax_scale=0.1,
    )


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Call], tuple[dict[str, Any], list[Any]]]]:
    """The package's tokenspeed_mla_decode, as a function from a call to (what is compiled, what is passed)."""
    asked: dict[str, Any] = {}
    passed: list[Any] = []

    def compiled(**options: Any) -> Callable[..., None]:
        asked.update(options)
        return lambda *arguments: passed.extend(arguments)

    tvm_ffi = types.ModuleType("tvm_ffi")
    tvm_ffi.use_torch_stream = contextlib.nullcontext  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tvm_ffi", tvm_ffi)
    monkeypatch.setattr(upstream, "_get_compiled_mla_kernel", compiled)

    def run(call: Call) -> tuple[dict[str, Any], list[Any]]:
        asked.clear()
        passed.clear()
        monkeypatch.setattr(upstream, "get_num_sm", lambda device: call.num_sms)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: choose.capability(call.arch))

        def empty(*shape: int, dtype: Any = torch.int32) -> Any:
            return torch.empty(shape, dtype=dtype, device="meta")

        upstream.tokenspeed_mla_decode(
            empty(call.batch, call.tokens, call.heads, 576, dtype=DTYPES[call.dtype]),
            empty(8, call.page_size, 576, dtype=DTYPES[call.dtype]),
            empty(1 << 34, dtype=torch.int8),
            512,
            64,
            empty(call.batch, call.max_pages),
            empty(call.batch),
            call.max_pages * call.page_size,
            0.1,
            return_lse=True,
        )
        return dict(asked), list(passed)

    yield run
    monkeypatch.undo()


def test_ten_thousand_calls_are_planned_as_the_package_plans_them(wrapper: Callable[..., Any]) -> None:
    rng = random.Random(7)
    seen: set[tuple[int, bool, bool]] = set()
    for _ in range(CALLS):
        call = random_call(rng)
        spec = spec_of(call)
        assert choose.decode_reasons(spec) == []  # and the package's own can_implement, inside, agrees
        config = choose.decode_config(spec)
        tiles = choose.query_tiles(config, call.arch)
        num_keys = call.max_pages * call.page_size
        splits = choose.split_count(config, call.arch, call.batch, call.num_sms, num_keys)
        shape = choose.workspace_shape(config, call.arch, call.batch, splits)

        asked, passed = wrapper(call)
        workspace, split_kv = passed[7], passed[8]
        assert (tiles.fold, tiles.packed) == (asked["fold_sq_factor"], asked["pack_q"]), call
        assert splits == int(split_kv), call
        assert asked["is_workspace_size_zero"] == (splits == 1), call
        if workspace is None:
            assert shape == (1, choose.LEAST_WORKSPACE)
        else:
            assert shape[0] * shape[1] == workspace.numel() < 1 << 31, call
        assert tiles.count * tiles.stride >= call.tokens * call.heads > (tiles.count - 1) * tiles.stride, call
        if config.fp8:
            assert asked["reducer_max_splits"] <= choose.reducer_splits(config, call.arch), call
        assert splits <= choose.reducer_splits(config, call.arch), call
        assert not asked["is_persistent"] and asked["is_var_seq"] and not asked["is_var_split_kv"]
        assert asked["skip_correction_threshold"] == (8.0 if config.fp8 else 0.0)
        seen.add((tiles.rows, tiles.packed, splits > 1))
    # Every kind of plan was among them: the small tile never packs.
    assert seen == {(64, False, s) for s in (True, False)} | {(128, p, s) for p in (True, False) for s in (True, False)}


def test_tiles_are_those_of_the_package() -> None:
    from tokenspeed_mla.mla_helpers import select_mla_decode_tilers

    for arch in choose.ARCHS:
        for dtype in DTYPES:
            for heads in range(1, 129):
                for tokens in (1, 2, 3, 4, 8, 16, 64):
                    config = choose.DecodeConfig(dtype, heads, tokens)
                    tilers = select_mla_decode_tilers(
                        heads, tokens, is_fp8=config.fp8, compute_capability=choose.capability(arch)
                    )
                    rows = choose.query_tiles(config, arch).rows
                    assert tilers == ((rows, 128), (rows, 256))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_size": 1}, "page size is 1 (rows of single-token pages are no legal TMA box)"),
        ({"page_size": 256}, "page size is 256"),
        ({"heads": 129}, "H is 129; TokenSpeed's decode takes at most 128"),
        ({"dtype": "float32"}, "q.dtype is float32"),
        ({"tokens": 257}, "S is 257"),
        ({"batch": 1 << 18}, "B is 262144; TokenSpeed's kernels index 2^31 elements, B <= 65535 here"),
    ],
)
def test_limits_are_reasons(change: dict[str, Any], reason: str) -> None:
    call = Call(choose.ARCHS[0], 148, "bfloat16", 4, 1, 64, 64, 8)._replace(**change)
    (said,) = choose.decode_reasons(spec_of(call))
    assert reason in said


def test_scales_survive_being_sizes() -> None:
    import struct

    for scale in (0.1352337789, 1.0, 0.0, -2.5, 1e-30, 448.0, float("inf")):
        sizes = choose.scale_sizes(scale, 2 * scale)
        assert all(1 <= size <= 65536 for size in sizes) and len(sizes) == len(choose.SCALE_OPERANDS)
        words = ((sizes[0] - 1) << 16 | (sizes[1] - 1), (sizes[2] - 1) << 16 | (sizes[3] - 1))
        assert struct.pack("<2I", *words) == struct.pack("<2f", scale, 2 * scale)
