"""The part of docs/guides/derivatives.md's table that is about torch and not about prefill, whose tests are
test_gradient.py and test_prefill_kv.py."""

from __future__ import annotations

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import tsmla_bridge
import tsmla_jax
from tests.bridge.inputs import tensor
from tests.emulator.launcher import Gpu

TABLES = torch.tensor([[1, 0]], dtype=torch.int32)
STARTS, LENS = torch.tensor([2], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)


def gather(cache: torch.Tensor, implementation: str | None = None) -> torch.Tensor:
    return tsmla_bridge.gather_kv_cache(
        cache, TABLES, STARTS, LENS, total_len=22, kv_scale=0.5, implementation=implementation
    )


def test_a_gather_is_differentiated_in_torch_operations(gpu: Gpu) -> None:
    cache = torch.randn(2, 16, 64).bfloat16()
    plain = gather(cache)
    assert len(gpu.launches) == 1
    derived = gather(cache.requires_grad_())
    assert len(gpu.launches) == 1 and torch.equal(derived, plain)
    derived.float().sum().backward()
    want = torch.zeros(2, 16, 64)
    want[1, 2:], want[0, :6] = 0.5, 0.5
    assert cache.grad is not None and torch.equal(cache.grad.float(), want)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(gather(forward_ad.make_dual(cache.detach(), torch.ones_like(cache)))).tangent
    assert len(gpu.launches) == 1 and tangent is not None and tangent.float().sum() == 0.5 * 20 * 64
    with pytest.raises(NotImplementedError, match="can't run this call: a derivative is asked for; the kernel has"):
        gather(cache, "cute")
    with torch.no_grad():
        gather(cache, "cute")
    assert len(gpu.launches) == 2


def test_kernels_without_a_derivative_drop_no_tangent(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    q, cache = torch.randn(1, 1, 16, 576).bfloat16(), torch.randn(2, 64, 576).bfloat16()
    for _ in range(2):  # the second call finds the first one's plan
        tsmla_bridge.mla_decode(q, cache, TABLES, LENS, softmax_scale=0.1)
    launches = len(gpu.launches)
    for given in ({"q": q}, {"kv_cache": cache}):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="mla_decode has no derivative"):
            tangents = {name: forward_ad.make_dual(value, torch.ones_like(value)) for name, value in given.items()}
            call = {"q": q, "kv_cache": cache} | tangents
            tsmla_bridge.mla_decode(**call, block_tables=TABLES, seq_lens=LENS, softmax_scale=0.1)
    assert len(gpu.launches) == launches


def decoded(scale: torch.Tensor) -> torch.Tensor:
    q, cache = torch.ones(1, 1, 16, 576).bfloat16(), torch.ones(2, 64, 576).bfloat16()
    return tsmla_bridge.mla_decode(q, cache, TABLES, LENS, softmax_scale=scale)


def sparsely(scale: torch.Tensor, name: str = "softmax_scale") -> torch.Tensor:
    q, cache = torch.ones(1, 16, 576).bfloat16(), torch.ones(2, 64, 576).bfloat16()
    given = {"softmax_scale": 0.1, name: scale}
    return tsmla_bridge.sparse_mla(q, cache, torch.zeros(1, 64, dtype=torch.int32), **given)


def prefilled(scale: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
    arrays = {"q": torch.ones(4, 2, 192).bfloat16(), "v": torch.ones(4, 2, 128).bfloat16()}
    arrays |= {"k": arrays["q"], **given}
    starts = torch.tensor([0, 4], dtype=torch.int32)
    return tsmla_bridge.mla_prefill(**arrays, cu_seqlens_q=starts, max_q_len=4, softmax_scale=scale)


def test_kernels_drop_no_derivative_of_scales(gpu: Gpu) -> None:
    """Also where the call before, with the same tensors but for the scales, asked for none."""
    scale = torch.tensor(0.1)
    for call in (decoded, sparsely):
        call(scale)
    asking = scale.clone().requires_grad_()
    launches = len(gpu.launches)
    for name in ("softmax_scale", "q_scale", "kv_scale"):
        with pytest.raises(NotImplementedError, match=name):
            sparsely(asking, name)
    assert len(gpu.launches) == launches
    with pytest.raises(NotImplementedError, match="mla_decode has no derivative"):
        decoded(asking).sum().backward()
    gathered = tsmla_bridge.gather_kv_cache(torch.ones(2, 16, 64), TABLES, STARTS, LENS, total_len=20, kv_scale=asking)
    gathered.sum().backward()
    assert asking.grad == 20 * 64
    with torch.no_grad():
        assert not any(call(asking).requires_grad for call in (decoded, sparsely))


def test_kernels_drop_no_tangent_of_prefill_and_of_scales(gpu: Gpu) -> None:
    scale = torch.tensor(0.1)
    for call in (decoded, sparsely, prefilled):
        call(scale)
    launches = len(gpu.launches)
    with forward_ad.dual_level():
        for call in (decoded, sparsely, prefilled):
            with pytest.raises(NotImplementedError, match="call it on tensors without a tangent of forward mode"):
                call(forward_ad.make_dual(scale, scale))
        for name, width in (("q", 192), ("k", 192), ("v", 128)):
            values = torch.ones(4, 2, width).bfloat16()
            with pytest.raises(NotImplementedError, match="mla_prefill has no derivative"):
                prefilled(scale, **{name: forward_ad.make_dual(values, values)})
    assert len(gpu.launches) == launches


def test_what_trains_an_indexer_drops_no_tangent() -> None:
    q, weights, keys = torch.randn(2, 4, 16), torch.randn(2, 4), torch.randn(1, 8, 16)
    indices, attention = torch.zeros(2, 3, dtype=torch.int32), (torch.randn(2, 2, 16), keys, torch.zeros(2, 2))
    for i in range(3):
        with forward_ad.dual_level():
            given = [q, weights, keys]
            given[i] = forward_ad.make_dual(given[i], torch.ones_like(given[i]))
            with pytest.raises(NotImplementedError, match="indexer_selected_logits has no derivative"):
                tsmla_bridge.indexer_selected_logits(*given, indices)
            with pytest.raises(NotImplementedError, match="indexer_loss has no derivative"):
                tsmla_bridge.indexer_loss(*given, *attention, softmax_scale=1.0, indices=indices)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_the_reference_of_mla_decode_has_its_derivative_on_a_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, mode: str):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    q, cache = torch.randn(1, 1, 16, 576), torch.randn(2, 64, 576)
    decode = functools.partial(
        tsmla_bridge.mla_decode,
        kv_cache=cache, block_tables=TABLES, seq_lens=LENS, softmax_scale=0.1, implementation="reference",
    )  # fmt: skip
    decode(q)  # the next call may find this one's plan
    if mode == "reverse":
        decode(q.requires_grad_()).sum().backward()
        assert q.grad is not None and q.grad.abs().sum() > 0
    else:
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(decode(forward_ad.make_dual(q, torch.ones_like(q)))).tangent
        assert tangent is not None
    assert not gpu.launches


@pytest.mark.parametrize("name", ["gather_kv_cache", "merge_attention_states", "mla_decode"])
def test_under_torch_compile_these_are_refused(name: str) -> None:
    torch._dynamo.reset()
    cache = torch.randn(2, 16, 64, requires_grad=True)
    outs, lses = torch.randn(2, 3, 1, 8, requires_grad=True), torch.randn(2, 3, 1)
    calls = {
        "gather_kv_cache": lambda: gather(cache),
        "merge_attention_states": lambda: tsmla_bridge.merge_attention_states(outs, lses)[0],
        "mla_decode": lambda: tsmla_bridge.mla_decode(
            cache[:1, :1, None], cache.detach(), TABLES, LENS, softmax_scale=0.3, latent_dim=48
        ),
    }
    instead = "train through expanded" if name == "mla_decode" else "an eager call has one"
    message = f"{name} has no derivative in this implementation; {instead}"
    # torch differentiates while it compiles, and wraps what it meets there.
    with pytest.raises((NotImplementedError, torch._dynamo.exc.BackendCompilerFailed), match=message):
        torch.compile(calls[name], fullgraph=True, backend="aot_eager")().sum().backward()
    calls[name]().sum().backward()


def test_a_write_is_refused() -> None:
    cache, slots = torch.zeros(2, 16, 64), torch.tensor([17, 3], dtype=torch.int32)
    latent = torch.randn(2, 64, requires_grad=True)
    message = "write_kv_cache has no derivative in this implementation; call it under torch.no_grad"
    with pytest.raises(NotImplementedError, match=message):
        tsmla_bridge.write_kv_cache(cache, latent, None, slots)
    with pytest.raises(NotImplementedError, match=message):
        tsmla_bridge.write_kv_cache(cache, latent.detach(), None, slots, kv_scale=torch.tensor(2.0, requires_grad=True))
    assert not cache.any()
    written = tsmla_bridge.write_kv_cache(cache, latent.detach(), None, slots)
    assert not written.requires_grad and torch.equal(written.view(32, 64)[[17, 3]], latent.detach())


@pytest.mark.parametrize("packed", [False, True])
def test_nan_of_unused_keys_is_in_no_derivative_of_logits(packed: bool) -> None:
    """In jax too. One key is seen, by the first of two tokens; the second is of no request."""
    q, weights = np.random.default_rng(0).standard_normal((2, 3, 8)), np.ones((2, 3), np.float32)
    q = q.astype(ml_dtypes.float8_e4m3fn if packed else np.float32)
    cache = np.full((1, 4, 12), 255, np.uint8) if packed else np.full((1, 4, 8), np.nan, np.float32)
    if packed:
        cache.reshape(-1)[:8] = 56  # e4m3's 1.0
        cache.reshape(-1)[32:36] = np.ones(1, np.float32).view(np.uint8)
    else:
        cache[0, 0] = 1
    tables, lens, offsets = np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.asarray([0, 1], np.int32)
    seen = np.maximum(q[0].astype(np.float32).sum(1), 0)
    for name in ("xla", "reference"):

        def total(weights: jax.Array, name: str = name) -> jax.Array:
            arrays = (q, weights, cache, tables, lens)
            return tsmla_jax.indexer_logits(*arrays, cu_seqlens_q=offsets, implementation=name)[0, 0]

        if packed and name == "xla":
            with pytest.raises(NotImplementedError, match="indexer_logits of quantised values has no derivative"):
                jax.grad(total)(weights)
        else:
            np.testing.assert_allclose(jax.grad(total)(weights), [seen, 0 * seen], rtol=1e-5)
    asking = torch.from_numpy(weights).requires_grad_()
    given = (tensor(q), asking, *map(torch.from_numpy, (cache, tables, lens)))
    tsmla_bridge.indexer_logits(*given, cu_seqlens_q=torch.from_numpy(offsets))[0, 0].backward()
    assert asking.grad is not None
    np.testing.assert_allclose(asking.grad, [seen, 0 * seen], rtol=1e-5)


@pytest.mark.parametrize("scores", [False, True], ids=["logits", "scores"])
def test_plain_keys_of_the_indexer_have_a_derivative(scores: bool) -> None:
    """That of jax's reference, in queries, weights and keys."""
    rng = np.random.default_rng(0)
    sizes = (3, 2, 8), (3, 2), (2, 4, 8)
    floats = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    where = np.asarray([[1, 0]] * 3, np.int32), np.asarray([7, 2, 5], np.int32)

    def total(*given: jax.Array) -> jax.Array:
        if scores:
            found = tsmla_jax.indexer_topk(*given, *where, k=2, return_scores=True, implementation="reference")[1]
        else:
            found = tsmla_jax.indexer_logits(*given, *where, implementation="reference")[:, :2]
        return (found**2).sum()

    asking = [torch.from_numpy(x).requires_grad_() for x in floats]
    given = (*asking, *map(torch.from_numpy, where))
    if scores:
        found = tsmla_bridge.indexer_topk(*given, 2, return_scores=True)[1]
    else:
        found = tsmla_bridge.indexer_logits(*given)[:, :2]
    assert isinstance(found, torch.Tensor)
    (found**2).sum().backward()
    for x, expected in zip(asking, jax.grad(total, (0, 1, 2))(*floats), strict=True):
        assert x.grad is not None
        np.testing.assert_allclose(x.grad, expected, rtol=1e-4, atol=1e-5)


def packed_arguments(op: str) -> dict[str, torch.Tensor]:
    """Arguments of an operation on packed caches; its results are zeros before it has run."""
    slots, angles = torch.tensor([17, 3], dtype=torch.int32), {name: torch.randn(2, 32) for name in ("cos", "sin")}
    one = torch.ones(1, dtype=torch.int32)
    return {
        "write_packed_kv_cache": {
            "kv_cache": torch.zeros(2, 16, 656, dtype=torch.uint8),
            "latent": torch.randn(2, 512),
            "k_rope": torch.randn(2, 64),
            "slot_mapping": slots,
            **angles,
        },
        "write_indexer_cache": {
            "k_cache": torch.zeros(2, 16, 128),
            "k": torch.randn(2, 128),
            "slot_mapping": slots,
            **angles,
        },
        "indexer_quantize": {"q": torch.randn(2, 4, 128), "weights": torch.randn(2, 4), **angles},
        "compress_write_kv_cache": {
            "cache": torch.zeros(2, 16, 64),
            "kv_score": torch.randn(2, 2, 64),
            "ape": torch.randn(2, 64),
            "state": torch.zeros(1, 2, 2, 64),
            "state_positions": torch.full((1, 2), -1, dtype=torch.int32),
            "norm_weight": torch.randn(64),
            "cos_sin": torch.randn(4, 8),
            "block_tables": one[None],
            "state_slots": 0 * one,
            "seq_lens": 2 * one,
            "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32),
        },
    }[op]


@pytest.mark.parametrize(
    "op", ["write_packed_kv_cache", "write_indexer_cache", "indexer_quantize", "compress_write_kv_cache"]
)
def test_what_packs_is_refused(op: str) -> None:
    given = packed_arguments(op)
    static = {"ratio": 2, "overlap": False, "eps": 1e-6} if op == "compress_write_kv_cache" else {}
    call = functools.partial(getattr(tsmla_bridge, op), **static)
    for name, value in given.items():
        if not value.is_floating_point():
            continue
        asking = given | {name: value.clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match=f"{op} has no derivative in this implementation; call it under"):
            call(**asking)
        with torch.no_grad():
            call(**asking)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"{op} has no derivative"):
            call(**given | {name: forward_ad.make_dual(value, value)})
    if "cache" in op:
        first = next(iter(given.values()))
        first.zero_()
        call(**given)
        assert first.any()
