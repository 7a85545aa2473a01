"""indexer_logits, indexer_topk and sparse_mla on torch tensors on Blackwell: taken where they are named, and the code
around the packages' kernels, for which the stand-in computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tsmla_bridge
from tests.bridge.inputs import BF16, Inputs, assert_close, inputs
from tests.emulator.launcher import Gpu
from tests.gpu.small_grid import numbers
from tests.oracles import sparse_inputs
from tests.oracles.sparse_inputs import Call
from tsmla_kernels import launch, object_cache
from tsmla_kernels.catalog import SELECT_TOPK
from tsmla_kernels.topk import chunks

P, Z, M, T, K, HEADS = 40, 64, 9, 72, 70, 8
LENS, OFFSETS = (576, 0, 257), (0, 3, 3, 70)  # two rows behind the last request


WHY_NOT_MADE = launch.why_not_made


@pytest.fixture(autouse=True, params=[(10, 0), (10, 3)], ids=["sm_100a", "sm_103a"])
def blackwell(gpu: Gpu, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.capability = request.param
    monkeypatch.setattr(launch, "why_not_made", lambda kernel, config, arch: [])


def dense(seq_lens: list[int], *, dtype: str = "bfloat16", **shape: Any) -> Inputs:
    """A case of mla_decode that TokenSpeed's kernels serve: unused slots of last pages are finite, other pages NaN."""
    case = inputs(seq_lens, **({"q_dtype": dtype, "kv_dtype": dtype, "latent_dim": 512, "rope_dim": 64} | shape))
    page_size = case.kv_cache.shape[1]
    for table, length in zip(case.block_tables, seq_lens, strict=True):
        if length % page_size:
            case.kv_cache[table[length // page_size], length % page_size :] = 1.0
    return case


def launched(gpu: Gpu) -> list[set[str]]:
    """The operands of each launch by name, those of scales apart."""
    return [set(operands) for _, operands in gpu.launches]


# ---- the indexer


def problem(ragged: bool) -> dict[str, torch.Tensor]:
    """Arguments; what no token may read is a page of NaN, or no page."""
    rng = torch.Generator().manual_seed(3)
    lens = torch.tensor(LENS if ragged else [0, 1, 63, 64, 65, 255, 256, 257, 576] * (T // 9), dtype=torch.int32)
    used = torch.arange(M) < (-(-lens // Z))[:, None]
    tables = torch.randint(0, P - 1, used.shape, generator=rng, dtype=torch.int32)
    unused = torch.tensor([-1, P - 1, 2**31 - 1], dtype=torch.int32)[torch.arange(M) % 3]
    cache = torch.full((P, Z, 132), 0xFF, dtype=torch.uint8)
    keys = torch.randn((P - 1) * Z, 128, generator=rng).bfloat16()
    tsmla_bridge.write_indexer_cache(
        cache, keys, torch.arange((P - 1) * Z, dtype=torch.int32), implementation="reference"
    )
    given = {
        "q": torch.randn(T, HEADS, 128, generator=rng).to(torch.float8_e4m3fn),
        "weights": torch.randn(T, HEADS, generator=rng),
        "k_cache": cache,
        "block_tables": torch.where(used, tables, unused),
        "seq_lens": lens,
    }
    return given | ({"cu_seqlens_q": torch.tensor(OFFSETS, dtype=torch.int32)} if ragged else {})


@pytest.mark.parametrize("ragged", [False, True])
def test_logits(gpu: Gpu, ragged: bool) -> None:
    given = problem(ragged)
    want = tsmla_bridge.indexer_logits(**given)
    assert not gpu.launches  # no one named the kernel
    out = torch.empty_like(want)
    for places in ({}, {"out": out}):
        got = tsmla_bridge.indexer_logits(**given, implementation="cute", **places)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
        assert "schedule" in gpu.operands
    assert got is out and len(gpu.launches) == 2


@pytest.mark.parametrize("flags", [(), ("return_slots",), ("return_slots", "return_scores"), ("return_bits",)])
@pytest.mark.parametrize("ragged", [False, True])
def test_topk_by_chunks(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, ragged: bool, flags: tuple[str, ...]) -> None:
    monkeypatch.setattr(chunks, "WORKSPACE_BYTES", 33 * 4 * M * Z)
    given, options = problem(ragged), dict.fromkeys(flags, True)
    given["weights"] = given["weights"].abs()  # no two scores of a row are equal
    want = tsmla_bridge.indexer_topk(**given, k=K, **options)
    assert not gpu.launches
    got = tsmla_bridge.indexer_topk(**given, k=K, implementation="cute", **options)
    assert ["schedule" in names for names in launched(gpu)] == [True, False] * 3
    for one, other in zip(got, want, strict=True) if "return_slots" in flags else ((got, want),):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_what_the_indexers_kernel_does_not_take(gpu: Gpu) -> None:
    given = problem(False)
    plain = given | {"q": given["q"].bfloat16(), "k_cache": torch.zeros(P, Z, 128).bfloat16()}
    tsmla_bridge.indexer_logits(**plain)
    with pytest.raises(NotImplementedError, match="FlashInfer's kernel takes float8_e4m3fn"):
        tsmla_bridge.indexer_logits(**plain, implementation="cute")
    assert not gpu.launches


@pytest.mark.parametrize("fault", ["plain keys", "no package", "sm_107a"])
@pytest.mark.parametrize("ragged", [False, True])
def test_topk_of_logits_that_the_indexers_kernel_does_not_take(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, ragged: bool, fault: str
) -> None:
    """Torch operations compute them, chunk by chunk, as jax's do."""
    monkeypatch.setattr(chunks, "WORKSPACE_BYTES", 33 * 4 * M * Z)
    given = problem(ragged)
    if fault == "plain keys":
        keys = torch.randn(P, Z, 128, generator=torch.Generator().manual_seed(4))
        given |= {"q": given["q"].bfloat16(), "k_cache": keys.bfloat16()}
    elif fault == "sm_107a":
        gpu.capability = (10, 7)
    else:
        monkeypatch.setattr(launch, "why_not_made", lambda kernel, *_: ["absent"] * (kernel is not SELECT_TOPK))
    want = tsmla_bridge.indexer_topk(**given, k=K, return_slots=True, return_scores=True)
    got = tsmla_bridge.indexer_topk(**given, k=K, return_slots=True, return_scores=True, implementation="cute")
    assert ["schedule" in names for names in launched(gpu)] == [False] * 3
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


# ---- attention over selected rows

CASES: dict[str, dict[str, Any]] = {
    "V3.2": {"layout": "v32", "sinks": True},
    "V3.2, few slots": {"layout": "v32", "tokens": 2, "selected": 7, "pages": 9, "heads": 130},
    "V3.2, pages with gaps": {"layout": "v32", "gap": 3, "lengths": False},
    "V4": {"layout": "v4", "window": 4, "sinks": True},
    "V4, remapped slots": {"layout": "v4", "gap": 1, "window": 8, "heads": 64},
    "V4, window alone": {"layout": "v4", "selected": 65},
    "plain e4m3": {"layout": "plain"},
    "plain": {"layout": "plain", "kv_dtype": "bfloat16", "sinks": True},
    "plain, two caches": {"layout": "plain", "kv_dtype": "float16", "dtype": "float16", "window": 8},
    "plain, no rope": {"layout": "plain", "kv_dtype": "bfloat16", "width": 512},
}


def attend(case: Call, **changed: Any) -> Any:
    """The case by the kernel that is named, with lse; some of its arguments changed."""
    given = {name: numbers(array) for name, array in case.arrays.items()}
    options = case.options | {"return_lse": True, "implementation": "cute"}
    return tsmla_bridge.sparse_mla(**(given | options | changed))


@pytest.mark.parametrize("name", CASES)
def test_attention(gpu: Gpu, name: str) -> None:
    case = sparse_inputs.call(**CASES[name])
    memory = torch.empty(*case.arrays["q"].shape[:2], 512, dtype=numbers(case.arrays["q"]).dtype)
    for places in ({}, {"out": memory}):
        for result, want, tolerance in zip(attend(case, **places), case.want(), (2**-6, 1e-4), strict=True):
            assert_close(result, want, tolerance)
    assert len(gpu.launches) == 2 and "logit_scale_high" in gpu.operands


def test_a_plain_cache_is_read_where_it_lies(gpu: Gpu) -> None:
    case = sparse_inputs.call("plain", kv_dtype="bfloat16")
    cache = numbers(case.arrays["kv_cache"])
    pool = torch.full((len(cache), 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
    pool[:, 1] = cache
    for given in (cache, pool[:, 1]):
        assert_close(attend(case, kv_cache=given)[0], case.want()[0], 2**-6)
        assert gpu.operands["rows"].data_ptr() == given.data_ptr()
    storage = pool.untyped_storage()
    end = gpu.operands["rows"].data_ptr() + 2 * gpu.operands["rows"].numel()
    assert end <= storage.data_ptr() + storage.nbytes()


def test_what_the_attentions_kernel_does_not_take(gpu: Gpu) -> None:
    case = sparse_inputs.call("plain", kv_dtype="bfloat16", window=4)
    for changed, reason in (
        ({"kv_scale": 2.0}, "kv_scale is 2 and compressed_kv_scale 0.02; cuDNN's kernel takes one factor"),
        ({"softmax_scale": torch.tensor(1.0)}, "softmax_scale, q_scale or a cache's scale is an array"),
        ({"batch_invariant": True}, "batch_invariant is True; nobody has checked that of cuDNN's kernel"),
        ({"q": numbers(case.arrays["q"]).float()}, r"q\.dtype is float32; cuDNN's kernel takes bfloat16 or float16"),
    ):
        with pytest.raises(NotImplementedError, match=f"^sparse_mla: implementation='cute' can't run.*{reason}"):
            attend(case, **changed)
    assert not gpu.launches


@pytest.mark.parametrize(("tokens", "selected"), [(0, 4), (3, 0)])
def test_nothing_to_attend_to(gpu: Gpu, tokens: int, selected: int) -> None:
    q, indices = torch.ones(tokens, 3, 576).bfloat16(), torch.ones(tokens, selected, dtype=torch.int32)
    cache = torch.zeros(2, 4, 656, dtype=torch.uint8)
    out, lse = tsmla_bridge.sparse_mla(
        q, cache, indices, softmax_scale=1.0, return_lse=True, implementation="cute"
    )  # fmt: skip
    assert not out.any() and torch.isneginf(lse).all() and not gpu.launches


# ---- dense attention


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", [16, 128])
def test_decode(gpu: Gpu, dtype: str, page_size: int) -> None:
    case = dense([5, 33, 0, 2, 200], s=3, dtype=dtype, page_size=page_size)
    options = {"kv_scale": 2.0, "return_lse": True, "implementation": "cute"}
    want = case.want(kv_scale=2.0)
    for changed in ({}, {"kv_scale": torch.tensor(2.0)}, {"batch_invariant": True}):
        got = tsmla_bridge.mla_decode(*case.arrays, **(case.options | options | changed))
        for result, right, tolerance in zip(got, want, (2**-6, 1e-3), strict=True):
            assert_close(result, right, tolerance)
    assert len(gpu.launches) == 3 and gpu.operands["workspace"].shape[0] == 1
    assert ["scales" in operands for _, operands in gpu.launches] == [False, True, False]


def test_decode_of_tokens_that_see_some_of_the_keys(gpu: Gpu) -> None:
    case = dense([130, 0, 257], s=3, page_size=64)
    visible = torch.tensor([[7, -1, 130], [4, 0, 1], [300, 256, 64]], dtype=torch.int32)
    given = case.options | {"visible_lens": visible, "return_lse": True}
    want = tsmla_bridge.mla_decode(*case.arrays, **given, implementation="reference")
    got = tsmla_bridge.mla_decode(*case.arrays, **given, implementation="cute")
    assert gpu.launches
    for one, other in zip(got, want, strict=True):
        assert_close(one, other.double().numpy(), BF16)


def test_ragged_decode_over_a_layer_of_a_pool(gpu: Gpu) -> None:
    case = dense([33, 5, 70], s=3, q_lens=[2, 0, 3], padding_rows=2)
    cache = case.kv_cache
    pool = torch.full((len(cache), 3, *cache.shape[1:]), 0.0, dtype=cache.dtype)
    pool[:, 1] = cache
    options = case.options | {"return_lse": True, "implementation": "cute"}
    pair = case.q[..., :512].clone(), case.q[..., 512:].clone()
    for arrays in (case.named, case.named | {"kv_cache": pool[:, 1]}, case.named | {"q": pair}):
        got = tsmla_bridge.mla_decode(**arrays, **options)
        for result, right, tolerance in zip(got, case.want(), (2**-6, 1e-3), strict=True):
            assert_close(result, right, tolerance)
    assert len(gpu.launches) == 3


def test_a_slot_that_is_not_finite_is_named(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    case = dense([5, 33])
    last = case.block_tables[1, 32 // case.kv_cache.shape[1]]
    case.kv_cache[last, -1] = torch.nan
    with pytest.raises(ValueError, match="request 1 leaves a slot of its last page unused that is not finite"):
        tsmla_bridge.mla_decode(*case.arrays, **case.options, implementation="cute")


def prefill_arrays(dtype: torch.dtype) -> dict[str, Any]:
    """A request with more queries than keys, one without queries, rows of no request."""
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(rows, 2, 192, generator=rng).to(dtype) for rows in (330, 90))
    v = torch.randn(90, 2, 128, generator=rng)
    v[80:] = torch.nan
    offsets = [torch.tensor(each, dtype=torch.int32) for each in ([0, 300, 300, 320], [0, 20, 30, 80])]
    return {
        "q": q, "k": k, "v": v.to(dtype), "cu_seqlens_q": offsets[0], "cu_seqlens_kv": offsets[1], "max_q_len": 300,
        "max_kv_len": 50, "softmax_scale": 0.07, "return_lse": True,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("causal", [True, False])
def test_prefill(gpu: Gpu, dtype: torch.dtype, causal: bool) -> None:
    given = prefill_arrays(dtype) | {"causal": causal, "v_scale": 0.5}
    want = tsmla_bridge.mla_prefill(**given, implementation="reference")
    out = torch.empty_like(want[0])
    for changed in ({}, {"out": out}, {"softmax_scale": torch.tensor(0.07)}):
        got = tsmla_bridge.mla_prefill(**(given | changed), implementation="cute")
        for result, right, tolerance in zip(got, want, (2**-6, 1e-4), strict=True):
            torch.testing.assert_close(result, right, rtol=tolerance, atol=tolerance)
    assert len(gpu.launches) == 3 and gpu.operands["longest_q"].shape == (300,)


def test_prefill_of_kv_expands_it(gpu: Gpu) -> None:
    given = prefill_arrays(torch.bfloat16)
    kv, k_rope = torch.cat((given.pop("k")[..., :128], given.pop("v")), -1), torch.randn(90, 64).bfloat16()
    want = tsmla_bridge.mla_prefill_kv(**given, kv=kv, k_rope=k_rope, implementation="reference")
    got = tsmla_bridge.mla_prefill_kv(**given, kv=kv, k_rope=k_rope, implementation="cute")
    for result, right, tolerance in zip(got, want, (2**-6, 1e-4), strict=True):
        torch.testing.assert_close(result, right, rtol=tolerance, atol=tolerance)
    assert len(gpu.launches) == 1


def test_what_dense_attentions_kernels_do_not_take(gpu: Gpu) -> None:
    with pytest.raises(NotImplementedError, match="page size is 8; TokenSpeed's decode takes 16, 32, 64 or 128"):
        decode_call(page_size=8, implementation="cute")
    with pytest.raises(NotImplementedError, match=r"q\.dtype is float16; TokenSpeed's prefill takes"):
        tsmla_bridge.mla_prefill(**prefill_arrays(torch.float16), implementation="cute")
    assert not gpu.launches


# ---- names


def sparse_call(**options: Any) -> Any:
    return attend(sparse_inputs.call("v32"), **options)


def decode_call(page_size: int = 32, **options: Any) -> Any:
    case = dense([5], page_size=page_size)
    return tsmla_bridge.mla_decode(*case.arrays, **(case.options | options))


def prefill_call(**options: Any) -> Any:
    return tsmla_bridge.mla_prefill(**prefill_arrays(torch.bfloat16), **options)


def prefill_kv_call(**options: Any) -> Any:
    given = prefill_arrays(torch.bfloat16)
    kv = torch.cat((given.pop("k")[..., :128], given.pop("v")), -1)
    return tsmla_bridge.mla_prefill_kv(**given, kv=kv, k_rope=torch.zeros(90, 64).bfloat16(), **options)


@pytest.mark.parametrize("call", [sparse_call, decode_call, prefill_call, prefill_kv_call])
def test_nothing_unproven_is_taken_without_its_name(gpu: Gpu, call: Callable[..., Any]) -> None:
    arch = f"sm_{gpu.capability[0]}{gpu.capability[1]}a"
    said = f'implementation=None can\'t run this call: the kernel is untested on {arch}; pass implementation="cute"'
    with pytest.raises(NotImplementedError, match=said):
        call(implementation=None)
    assert not gpu.launches


def logits_call(**options: Any) -> Any:
    return tsmla_bridge.indexer_logits(**problem(True), **options)


@pytest.mark.parametrize("call", [sparse_call, logits_call, decode_call, prefill_call])
def test_a_missing_package_is_named(gpu: Gpu, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "why_not_made", WHY_NOT_MADE)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(object_cache, "is_stored", lambda kernel, config, arch: False)
    with pytest.raises(NotImplementedError, match=r"_sm100 is made of .*, which is not installed: pip install"):
        call(implementation="cute")
    assert not gpu.launches
