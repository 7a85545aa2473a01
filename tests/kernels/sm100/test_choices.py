"""Fold, packing, splits, workspace and visible keys against tokenspeed-mla itself, over ten thousand random calls.

The package's wrapper runs on tensors without memory, with the GPU's properties given here, up to the call of the
compiled kernel. The options that it compiles with and the arguments that it passes are compared with the adapter's
choice. The statements of its kernels that bound the visible keys of a query row run here on numpy's arrays.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from tsmla_kernels import contract
from tsmla_kernels.sm100 import config as sm100
from tsmla_kernels.sm100.dense_arrays import visible_keys

torch = pytest.importorskip("torch")
upstream = pytest.importorskip("tokenspeed_mla.mla_decode")
library_of = pytest.importorskip("tsmla_bridge.runtime.library").library_of

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
        arch=rng.choice(sm100.ARCHS),
        num_sms=rng.choice([78, 132, 148, 152, 160, 224]),
        dtype=rng.choice(list(DTYPES)),
        batch=int(2 ** rng.uniform(0, 10)),
        tokens=rng.choice([1, 1, 2, 3, 4, 5, 6, 7, 8, rng.randint(9, 64)]),
        heads=rng.choice([8, 16, 32, 64, 128, rng.randint(1, 128)]),
        page_size=rng.choice(sm100.PAGE_SIZES),
        max_pages=int(2 ** rng.uniform(0, 13)),
    )
    too_large = call.batch * call.tokens * call.heads * sm100.LATENT_DIM >= sm100.MAX_ELEMENTS
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
    """The package's tokenspeed_mla_decode, as a function from a call to (compile options, kernel arguments)."""
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
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: sm100.capability(call.arch))

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
        assert sm100.decode_reasons(spec) == []  # and the package's own can_implement, inside, agrees
        config = sm100.decode_config(spec)
        tiles = sm100.query_tiles(config, call.arch)
        num_keys = call.max_pages * call.page_size
        splits = sm100.split_count(config, call.arch, call.batch, call.num_sms, num_keys)
        shape = sm100.workspace_shape(config, call.arch, call.batch, splits)

        asked, passed = wrapper(call)
        workspace, split_kv = passed[7], passed[8]
        assert (tiles.fold, tiles.packed) == (asked["fold_sq_factor"], asked["pack_q"]), call
        assert splits == int(split_kv), call
        assert asked["is_workspace_size_zero"] == (splits == 1), call
        if workspace is None:
            assert shape == (1, sm100.LEAST_WORKSPACE)
        else:
            assert shape[0] * shape[1] == workspace.numel() < 1 << 31, call
        assert tiles.count * tiles.stride >= call.tokens * call.heads > (tiles.count - 1) * tiles.stride, call
        if config.fp8:
            assert asked["reducer_max_splits"] <= sm100.reducer_splits(config, call.arch), call
        assert splits <= sm100.reducer_splits(config, call.arch), call
        assert not asked["is_persistent"] and asked["is_var_seq"] and not asked["is_var_split_kv"]
        assert asked["skip_correction_threshold"] == (8.0 if config.fp8 else 0.0)
        seen.add((tiles.rows, tiles.packed, splits > 1))
    # Every kind of plan was among them: the small tile never packs.
    assert seen == {(64, False, s) for s in (True, False)} | {(128, p, s) for p in (True, False) for s in (True, False)}


Rule = Callable[..., np.ndarray]


def rules_of(name: str, class_name: str) -> list[Rule]:
    """The statements that give a row's bound k_bound, of a kernel's softmax: for SM100, and for the others."""
    kernel = getattr(pytest.importorskip(f"tokenspeed_mla.{name}"), class_name)
    tree = ast.parse(inspect.getsource(sys.modules[kernel.__module__]))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "local_visible_lens" in ast.unparse(node.test):
            targets = [ast.unparse(each.targets[0]) for each in node.orelse if isinstance(each, ast.Assign)]
            if targets == ["k_bound"]:
                found.append(compile(ast.Module([node], []), kernel.__module__, "exec"))
    assert len(found) == 2

    def rule(
        code: types.CodeType, call: Call, tiles: sm100.QueryTiles, rows: np.ndarray, request: np.ndarray,
        *, lens: np.ndarray, q_len: Any, causal: bool, local: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        """The bound of each of `rows`, numbers of a request's tiles' rows on end."""
        tile, row = rows // tiles.rows, rows % tiles.rows
        cta_rows = tiles.rows if tiles.rows == 64 else tiles.rows // 2
        made = types.SimpleNamespace
        names: dict[str, Any] = {
            "cutlass": made(const_expr=bool),
            "min": np.minimum,
            "i": 0,
            "tTR_tS": [(row % cta_rows, None)],
            "cta_m_rows": cta_rows,
            "self": made(
                is_causal=causal, pack_q=tiles.packed, fold_sq_factor=tiles.fold, mma_qk_tiler=(tiles.rows, 128),
                num_heads=call.heads, seq_len_q=q_len, cp_world=1,
            ),
            "common_params": made(blk_coord=(row // cta_rows, tile, request), K=lens, local_visible_lens=local),
        }  # fmt: skip
        exec(code, names)
        return np.broadcast_to(names["k_bound"], (len(lens), len(rows)))

    return [functools.partial(rule, code) for code in found]


def test_ten_thousand_calls_see_the_keys_that_the_package_lets_them_see() -> None:
    rules = {
        True: rules_of("mla_decode_fp8", "BlackwellMultiHeadLatentAttentionForwardFP8"),
        False: rules_of("mla_decode_fp16", "BlackwellMultiHeadLatentAttentionForwardFP16"),
    }
    rng, numbers = random.Random(8), np.random.default_rng(8)
    seen: set[tuple[bool, ...]] = set()
    for _ in range(CALLS):
        call, causal, ragged = random_call(rng), rng.random() < 0.8, rng.random() < 0.3
        config = sm100.decode_config(spec_of(call))
        tiles = sm100.query_tiles(config, call.arch)
        rule = rules[config.fp8][call.arch != "sm_100a"]
        num_keys, tokens = call.max_pages * call.page_size, call.tokens
        lens = numbers.integers(0, num_keys + 1, 4, dtype=np.int32)
        lens[0], lens[1] = rng.choice([0, num_keys]), min(rng.randint(0, tokens), num_keys)  # fewer keys than queries
        q_lens = numbers.integers(0, tokens + 3, 4, dtype=np.int32) if ragged else None
        given = (None if each is None else torch.from_numpy(each) for each in (lens, q_lens))
        visible = visible_keys(library_of(torch.device("cpu")), *given, tokens=tokens, causal=causal).numpy()
        assert visible.shape == (4, tokens) and visible.dtype == np.int32
        assert (visible >= 0).all() and (visible <= lens[:, None]).all()  # as the package requires

        # Every row of every tile that is of a query, and behind the last tile's such rows some of padding.
        rows = np.arange(tiles.count * tiles.rows)
        flat = rows // tiles.rows * tiles.stride + rows % tiles.rows
        real = (rows % tiles.rows < tiles.stride) & (flat < tokens * call.heads)
        token, request = flat[real] // call.heads, np.arange(4)[:, None]
        own = functools.partial(rule, call, tiles, lens=lens[:, None], causal=causal)
        got = own(rows, request, q_len=tokens, local=visible)[:, real]
        np.testing.assert_array_equal(got, visible[:, token])
        if q_lens is None:
            want = own(rows[real], request, q_len=tokens, local=None)
        else:
            # The package's bound for each token of a request with its own number of queries, one token a tile.
            alone = sm100.QueryTiles(tiles.rows, tokens, call.heads, 1, False)
            index = token - (tokens - np.minimum(q_lens, tokens))[:, None]
            each = [
                rule(
                    call,
                    alone,
                    i * tiles.rows,
                    0,
                    lens=lens[b : b + 1, None],
                    q_len=q_lens[b],
                    causal=causal,
                    local=None,
                )
                for b, i in enumerate(index)
            ]
            got, want = np.where(index >= 0, got, 0), np.where(index >= 0, np.concatenate(each), 0)
        np.testing.assert_array_equal(got, want.clip(0))
        seen.add((config.fp8, call.arch == "sm_100a", causal, ragged, tiles.packed, tiles.fold > 1))
    # Both kernels, in both of their forms, with rows packed, folded and neither, of all kinds of calls.
    kinds = [(fold, pack) for fold, pack in itertools.product((True, False), repeat=2) if not (fold and pack)]
    sides = itertools.product((True, False), repeat=4)
    assert seen == {(*side, pack, fold) for side in sides for fold, pack in kinds}


def test_tiles_are_those_of_the_package() -> None:
    from tokenspeed_mla.mla_helpers import select_mla_decode_tilers

    for arch in sm100.ARCHS:
        for dtype in DTYPES:
            for heads in range(1, 129):
                for tokens in (1, 2, 3, 4, 8, 16, 64):
                    config = sm100.DecodeConfig(dtype, heads, tokens)
                    tilers = select_mla_decode_tilers(
                        heads, tokens, is_fp8=config.fp8, compute_capability=sm100.capability(arch)
                    )
                    rows = sm100.query_tiles(config, arch).rows
                    assert tilers == ((rows, 128), (rows, 256))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_size": 1}, "page size is 1 (rows of single-token pages are no legal TMA box)"),
        ({"page_size": 256}, "page size is 256"),
        ({"heads": 129}, "num_heads (H) is 129; TokenSpeed's decode takes at most 128"),
        ({"dtype": "float32"}, "q.dtype is float32"),
        ({"tokens": 257}, "S is 257"),
        ({"batch": 1 << 18}, "B is 262144; TokenSpeed's kernels index 2^31 elements, B <= 65535 here"),
    ],
)
def test_limits_are_reasons(change: dict[str, Any], reason: str) -> None:
    call = Call(sm100.ARCHS[0], 148, "bfloat16", 4, 1, 64, 64, 8)._replace(**change)
    (said,) = sm100.decode_reasons(spec_of(call))
    assert reason in said


def test_scales_survive_being_sizes() -> None:
    import struct

    for scale in (0.1352337789, 1.0, 0.0, -2.5, 1e-30, 448.0, float("inf")):
        sizes = sm100.scale_sizes(scale, 2 * scale)
        assert all(1 <= size <= 65536 for size in sizes) and len(sizes) == len(sm100.SCALE_OPERANDS)
        words = ((sizes[0] - 1) << 16 | (sizes[1] - 1), (sizes[2] - 1) << 16 | (sizes[3] - 1))
        assert struct.pack("<2I", *words) == struct.pack("<2f", scale, 2 * scale)
