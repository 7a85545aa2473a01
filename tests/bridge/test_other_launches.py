"""mla_prefill, the cache's operations and merging on the stand-in for the GPU: what their kernels are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tsmla_bridge
from tests.bridge.inputs import inputs
from tests.emulator.launcher import NUM_SMS, Gpu
from tsmla_bridge.runtime import loaded_kernels
from tsmla_kernels import launch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_prefill_goes_to_the_catalogs_kernel(gpu: Gpu, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, 2, width, generator=generator).to(dtype) for width in (192, 192, 128))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_q_len": 4, "max_kv_len": 4, "softmax_scale": 0.1}
    options |= {"q_scale": 2.0, "k_scale": 0.5, "v_scale": torch.tensor(3.0)}
    want, want_lse = tsmla_bridge.mla_prefill(q, k, v, **options, return_lse=True, implementation="reference")
    assert not gpu.launches
    got, got_lse = tsmla_bridge.mla_prefill(q, k, v, **options, return_lse=True)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want) and torch.equal(got_lse, want_lse)
    assert torch.equal(tsmla_bridge.mla_prefill(q, k, v, **options), want)
    assert len(gpu.launches) == 2
    assert gpu.operands["progress"].shape == (NUM_SMS,)  # the kernel's grid is as large as this
    wide = torch.cat((k, k), -1)[..., :192]
    with pytest.raises(ValueError, match="k: got shape"):
        tsmla_bridge.mla_prefill(q, wide, v, **options)


@pytest.mark.parametrize("tokens", [7, 1])
@pytest.mark.parametrize("heads", [3, 1])
def test_prefill_reads_values_in_a_wider_tensor(gpu: Gpu, tokens: int, heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, kv = (torch.randn(tokens, heads, width, generator=generator).bfloat16() for width in (192, 192, 256))
    cu = torch.tensor([0, tokens], dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_q_len": 7, "max_kv_len": 7, "softmax_scale": 0.1}
    v = kv[..., 128:]
    want = tsmla_bridge.mla_prefill(q, k, v.contiguous(), **options)
    assert gpu.operands["v"].shape == (tokens, heads, 128)
    assert torch.equal(tsmla_bridge.mla_prefill(q, k, v, **options), want)
    if not v.is_contiguous():
        assert gpu.operands["v"].shape == (tokens, heads, 256) and gpu.operands["v"].data_ptr() == v.data_ptr()


def test_other_views_of_values_are_refused(gpu: Gpu) -> None:
    q, k = (torch.zeros(7, 3, 192, dtype=torch.bfloat16) for _ in range(2))
    cu = torch.tensor([0, 7], dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_q_len": 7, "max_kv_len": 7, "softmax_scale": 0.1}
    for v in (
        torch.zeros(7, 3, 200, dtype=torch.bfloat16)[..., :128],  # no multiple of 64
        torch.zeros(7, 3, 320, dtype=torch.bfloat16)[..., 4:132],  # at no multiple of 16 bytes
        torch.zeros(7, 5, 128, dtype=torch.bfloat16)[:, :3],  # some of the heads
        torch.zeros(3, 7, 128, dtype=torch.bfloat16).transpose(0, 1),
    ):
        with pytest.raises(ValueError, match=r"v: got shape .*, or columns of one whose last axis is a multiple of 64"):
            tsmla_bridge.mla_prefill(q, k, v, **options)
    v = torch.zeros(7, 3, 256, dtype=torch.bfloat16)[..., 128:].requires_grad_()
    with pytest.raises(ValueError, match="v: got shape"):  # the derivative's kernel takes dense tensors alone
        tsmla_bridge.mla_prefill(q, k, v, **options)


def test_writes_and_gathers_go_to_the_catalogs_kernels(gpu: Gpu) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(5, 80, generator=generator).bfloat16()
    latent, k_rope = kv[:, :64], kv[:, 64:]
    slots = torch.tensor([3, -1, 70, 16, 99], dtype=torch.int32)
    cache = torch.randn(5, 16, 80, generator=generator).to(torch.float8_e4m3fn)
    wanted = cache.clone()
    tsmla_bridge.write_kv_cache(wanted, latent, k_rope, slots, kv_scale=0.5, implementation="reference")
    assert not gpu.launches
    for given in (cache, cache.clone()[:, None]):
        written = tsmla_bridge.write_kv_cache(given, latent, k_rope, slots, kv_scale=torch.tensor(0.5))
        assert written is given and torch.equal(given.view(cache.shape).float(), wanted.float())
        operands = gpu.operands
        assert operands["kv_cache"].data_ptr() == given.data_ptr()
        assert operands["latent"].data_ptr() == kv.data_ptr() and operands["latent"].shape == (5, 80)
    tables = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    starts, lens = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([20, 9], dtype=torch.int32)
    arrays = (cache, tables, starts, lens)
    want = tsmla_bridge.gather_kv_cache(*arrays, total_len=33, kv_scale=0.5, implementation="reference")
    assert torch.equal(tsmla_bridge.gather_kv_cache(*arrays, total_len=33, kv_scale=0.5), want)
    assert len(gpu.launches) == 3 and gpu.operands["kv_cache"].data_ptr() == cache.data_ptr()

    pool = torch.zeros(5, 2, 16, 80, dtype=torch.bfloat16)[:, 0]  # its pages have gaps: torch operations
    tsmla_bridge.write_kv_cache(pool, latent, k_rope, slots)
    assert len(gpu.launches) == 3 and pool.any()
    with pytest.raises(NotImplementedError, match=r"write_kv_cache: .* kv_cache has strides .* the kernel can't read"):
        tsmla_bridge.write_kv_cache(pool, latent, k_rope, slots, implementation="cute")


def test_rows_of_the_cache_itself_are_written_by_torch(gpu: Gpu) -> None:
    """As a compaction of a cache has them: a kernel would read some of them after it has overwritten them."""
    cache, slots = torch.randn(2, 16, 64).bfloat16(), torch.arange(1, 9, dtype=torch.int32)
    rows = cache.view(32, 64)[:8]
    want = torch.cat((rows[:1], rows, cache.view(32, 64)[9:]))
    with pytest.raises(NotImplementedError, match="latent lies in memory of kv_cache, which the kernel writes"):
        tsmla_bridge.write_kv_cache(cache, rows, None, slots, implementation="cute")
    tsmla_bridge.write_kv_cache(cache, rows, None, slots)
    assert not gpu.launches and torch.equal(cache.view(32, 64), want)

    packed = torch.zeros(2, 16, 656, dtype=torch.uint8)
    halves = packed.view(-1)[: 8 * 1152].view(torch.bfloat16).view(8, 576)
    with pytest.raises(NotImplementedError, match=r"latent lies in memory of kv_cache.* k_rope lies in memory"):
        tsmla_bridge.write_packed_kv_cache(packed, halves[:, :512], halves[:, 512:], slots, implementation="cute")
    keys = torch.zeros(2, 16, 132, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="slot_mapping lies in memory of k_cache"):
        own = keys.view(-1)[:32].view(torch.int32)
        tsmla_bridge.write_indexer_cache(keys, torch.zeros(8, 128).bfloat16(), own, implementation="cute")


@pytest.mark.parametrize("named", [False, True])
def test_slots_of_int64_are_read_where_they_lie(gpu: Gpu, named: bool) -> None:
    latent, k_rope = torch.randn(6, 64).bfloat16(), torch.randn(6, 16).bfloat16()
    slots = torch.tensor([3, -1, 70, 2**32 + 5, -(2**32) + 5, 16])  # the lower halves of two name a slot
    cache = torch.zeros(5, 16, 80, dtype=torch.bfloat16)
    gpu.runs = False  # the stand-in runs jax's definition, which has int32 alone
    tsmla_bridge.write_kv_cache(cache, latent, k_rope, slots, implementation="cute" if named else None)
    given = gpu.operands["slot_mapping"]
    assert given.dtype == torch.int64 and given.data_ptr() == slots.data_ptr()


@pytest.mark.parametrize("k_rope", [None, torch.empty(2, 0, dtype=torch.bfloat16)])
def test_latents_without_rope_columns_go_to_the_kernel(gpu: Gpu, k_rope: torch.Tensor | None) -> None:
    latent, slots = torch.randn(2, 64).bfloat16(), torch.tensor([17, 3], dtype=torch.int32)
    cache = torch.zeros(2, 16, 64, dtype=torch.bfloat16)
    tsmla_bridge.write_kv_cache(cache, latent, k_rope, slots)
    ((_, operands),) = gpu.launches
    assert operands["k_rope"].data_ptr() == latent.data_ptr()  # an address there must be
    assert torch.equal(cache.view(32, 64)[slots], latent)


def test_rows_that_are_one_row_are_written_by_torch(gpu: Gpu) -> None:
    """As expand makes them: the kernels read rows at a pitch."""
    cache, slots = torch.zeros(2, 16, 64, dtype=torch.bfloat16), torch.tensor([17, 3, -1], dtype=torch.int32)
    latent = torch.randn(1, 64).bfloat16()
    tsmla_bridge.write_kv_cache(cache, latent.expand(3, 64), None, slots)
    assert not gpu.launches and torch.equal(cache.view(32, 64)[slots[:2]], latent.expand(2, 64))
    with pytest.raises(NotImplementedError, match="latent"):
        tsmla_bridge.write_kv_cache(cache, latent.expand(3, 64), None, slots, implementation="cute")
    keys = torch.zeros(2, 16, 132, dtype=torch.uint8)
    tsmla_bridge.write_indexer_cache(keys, torch.ones(1, 128).bfloat16().expand(3, 128), slots)
    assert not gpu.launches and keys.count_nonzero()


def test_autograd_sees_what_kernels_write(gpu: Gpu) -> None:
    """A gradient that needs what a cache held, or a tensor given as out, must raise and not use what it holds now."""
    cache, slots = torch.randn(2, 16, 64).bfloat16(), torch.tensor([17, 3], dtype=torch.int32)
    rows, keys = torch.zeros(2, 16, 656, dtype=torch.uint8), torch.zeros(2, 16, 132, dtype=torch.uint8)
    weight = torch.ones(64, requires_grad=True)
    product = (cache * weight).sum()
    tsmla_bridge.write_kv_cache(cache, torch.randn(2, 64).bfloat16(), None, slots)
    gpu.runs = False  # the stand-in has no packed caches
    tsmla_bridge.write_packed_kv_cache(rows, torch.randn(2, 512).bfloat16(), torch.randn(2, 64).bfloat16(), slots)
    tsmla_bridge.write_indexer_cache(keys, torch.randn(2, 128).bfloat16(), slots)
    assert len(gpu.launches) == 3 and [x._version for x in (cache, rows, keys)] == [1, 1, 1]
    lens, tables = torch.tensor([9, 4], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    chosen, counts, words = (torch.zeros(shape, dtype=torch.int32) for shape in ((2, 4), (2,), (2, 4)))
    paged = {"order": "position", "block_tables": tables, "page_size": 8, "out": chosen, "counts": counts}
    tsmla_bridge.select_topk(torch.randn(2, 16), lens, 4, **paged)
    tsmla_bridge.selection_bits(tables, 100, out=words)
    assert len(gpu.launches) == 5 and [x._version for x in (chosen, counts, words)] == [1, 1, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    gpu.runs = True
    case = inputs([5, 33], q_dtype="bfloat16", kv_dtype="bfloat16", latent_dim=256, rope_dim=64)
    out, lse = tsmla_bridge.mla_decode(*case.arrays, **case.options, return_lse=True)
    assert out._version == lse._version == 0
    tsmla_bridge.mla_decode(*case.arrays, **case.options, return_lse=True, out=out, lse=lse)
    assert len(gpu.launches) == 7 and out._version == lse._version == 1


def test_memory_that_a_kernel_cannot_write_is_named_as_the_caller_named_it(gpu: Gpu) -> None:
    gpu.runs = False
    ints, lens = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    q, keys = torch.zeros(2, 64, 128).to(torch.float8_e4m3fn), torch.zeros(1, 64, 132, dtype=torch.uint8)
    indexer = (q, torch.zeros(2, 64), keys, ints[:, :1].contiguous(), lens)
    for call, dtype, columns in (
        (lambda out: tsmla_bridge.selection_bits(ints, 100, out=out), torch.int32, 4),
        (lambda out: tsmla_bridge.select_topk(torch.zeros(2, 16), lens, 4, return_bits=True, out=out), torch.int32, 4),
        (lambda out: tsmla_bridge.indexer_logits(*indexer, out=out), torch.float32, 64),
        (lambda out: tsmla_bridge.indexer_topk(*indexer, 4, return_bits=True, out=out), torch.int32, 4),
    ):
        out = torch.zeros(2 * columns + 1, dtype=dtype)[1:].view(2, columns)
        with pytest.raises(ValueError, match=r"^out: got address 0x.*; legal for the kernel: a multiple of 16"):
            call(out)
    assert not gpu.launches


def test_memory_that_overlaps_is_refused() -> None:
    case = inputs([5, 33], s=2)
    out, lse = tsmla_bridge.mla_decode(*case.arrays, **case.options, return_lse=True)
    both = torch.empty_like(out)
    with pytest.raises(ValueError, match="lse: got memory of out; legal: memory of its own"):
        place = both.view(-1)[: lse.numel()].view(lse.shape)
        tsmla_bridge.mla_decode(*case.arrays, **case.options, return_lse=True, out=both, lse=place)
    slots = torch.tensor([3], dtype=torch.int32)
    for name, write, row in (
        ("kv_cache", tsmla_bridge.write_kv_cache, (torch.ones(1, 8), None)),
        ("kv_cache", tsmla_bridge.write_packed_kv_cache, (torch.ones(1, 512), torch.ones(1, 64))),
        ("k_cache", tsmla_bridge.write_indexer_cache, (torch.ones(1, 8),)),
    ):
        packed = len(row) == 2 and row[1] is not None
        cache = torch.zeros(1, 4, 656, dtype=torch.uint8) if packed else torch.zeros(1, 4, 8)
        with pytest.raises(ValueError, match=rf"{name}: got shape \[2, .* legal: a tensor whose elements lie"):
            write(cache.expand(2, -1, -1), *row, slots)


def test_a_cache_narrower_than_one_store_is_written_by_torch(gpu: Gpu) -> None:
    cache, slots = torch.zeros(2, 16, 8, dtype=torch.float8_e4m3fn), torch.tensor([17, 3], dtype=torch.int32)
    latent = torch.ones(2, 8, dtype=torch.bfloat16)
    tsmla_bridge.write_kv_cache(cache, latent, None, slots)
    assert not gpu.launches and cache.float().sum() == 16
    with pytest.raises(NotImplementedError, match=r"latent_dim \(L\) is 8; with a float8_e4m3fn cache the cache kern"):
        tsmla_bridge.write_kv_cache(cache, latent, None, slots, implementation="cute")


def test_merges_go_to_the_catalogs_kernel(gpu: Gpu) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 3, 24, generator=generator).bfloat16()
    outs = [torch.randn(5, 3, 16, generator=generator).bfloat16(), wide[..., :16], wide[..., 8:]]
    lses = [torch.randn(5, 3, generator=generator), torch.randn(3, 5, generator=generator).T, torch.zeros(5, 3)]
    lses[0][2], outs[0][2], lses[2][:] = -torch.inf, torch.nan, -torch.inf
    want = tsmla_bridge.merge_attention_states(outs, lses, implementation="reference")
    assert not gpu.launches
    got = tsmla_bridge.merge_attention_states(outs, lses)
    ((stream, operands),) = gpu.launches
    assert stream == 0 and [x.dtype for x in got] == [torch.bfloat16, torch.float32]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert operands["out_1"].data_ptr() == wide.data_ptr() and operands["out_1"].shape == (15, 24)
    assert operands["lse_0"].data_ptr() == lses[0].data_ptr()
    assert torch.isfinite(got[0]).all()

    one = tsmla_bridge.merge_attention_states([wide[4, 2, 8:]], [torch.tensor(2.0)])  # a row of no other's stride
    assert torch.equal(one[0], wide[4, 2, 8:]) and one[1] == 2 and len(gpu.launches) == 2
    none = tsmla_bridge.merge_attention_states([out[:0] for out in outs], [lse[:0] for lse in lses])
    assert none[0].shape == (0, 3, 16) and len(gpu.launches) == 2


def test_merges_that_the_kernel_cannot_serve_are_torchs(gpu: Gpu) -> None:
    outs, lses = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3)
    turned = [out.transpose(0, 1) for out in torch.randn(2, 3, 5, 16)]
    derived = outs.clone().requires_grad_()
    for given, reason in (
        (turned, r"outs\[0\] has strides .* which the kernel can't read"),
        (list(outs.double()), "outs' dtype is float64; the merge kernel takes bfloat16, float16, float32"),
        (list(outs[..., 1:]), r"v_head_dim \(L\) is 15; in float32 the merge kernel takes a multiple of 4"),
        (list(derived), "a derivative is asked for; the kernel has none"),
    ):
        out, _ = tsmla_bridge.merge_attention_states(given, list(lses))
        want = torch.softmax(lses.to(out.dtype), 0)[..., None] * torch.stack(given)
        torch.testing.assert_close(out, want.sum(0))
        with pytest.raises(NotImplementedError, match=reason):
            tsmla_bridge.merge_attention_states(given, list(lses), implementation="cute")
    out.sum().backward()
    assert derived.grad is not None and not gpu.launches


@pytest.mark.parametrize("ragged", [False, True])
def test_indexer_logits_go_to_the_catalogs_kernel(gpu: Gpu, ragged: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(n, 8, 128, generator=generator).to(torch.float8_e4m3fn) for n in (3, 10))
    cache = keys.view(5, 16, 128)
    rows = 2 if ragged else 3
    tables = torch.randint(0, 5, (rows, 2), generator=generator, dtype=torch.int32)
    given = {
        "q": q,
        "weights": torch.randn(3, 8, generator=generator),
        "k_cache": cache,
        "block_tables": tables,
        "seq_lens": torch.tensor([20, 32, 1][:rows], dtype=torch.int32),
    }
    if ragged:
        given["cu_seqlens_q"] = torch.tensor([0, 1, 3], dtype=torch.int32)
    want = tsmla_bridge.indexer_logits(**given, implementation="reference")
    assert not gpu.launches
    assert torch.equal(tsmla_bridge.indexer_logits(**given), want)
    out = torch.empty_like(want)
    assert tsmla_bridge.indexer_logits(**given, out=out) is out and torch.equal(out, want)
    assert len(gpu.launches) == 2 and gpu.operands["logits"].data_ptr() == out.data_ptr()
    wide = torch.cat((cache, cache), -1)[..., :128]  # keys with gaps: torch operations
    assert torch.equal(tsmla_bridge.indexer_logits(**(given | {"k_cache": wide})), want)
    with pytest.raises(NotImplementedError, match=r"indexer_logits: .* k_cache has strides .* the kernel can't read"):
        tsmla_bridge.indexer_logits(**(given | {"k_cache": wide}), implementation="cute")


def test_the_runtime_is_looked_for_until_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every call: looking takes a fifth of a millisecond."""
    answers: list[Path | None] = [None, Path("libcute_dsl_runtime.so")]
    monkeypatch.setattr(loaded_kernels, "_found_runtime", False)
    monkeypatch.setattr(launch, "runtime_library", lambda: answers.pop(0))
    assert [loaded_kernels._runtime_is_here() for _ in range(4)] == [False, True, True, True]
