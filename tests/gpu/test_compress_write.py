"""compress_write_kv_cache on a GPU, inside jax, against torch operations: prefill, chunks, decode steps, all caches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tsmla_bridge
import tsmla_jax
from tests.gpu.cache_inputs import unpacked_keys
from tsmla_jax import sparse

pytestmark = pytest.mark.gpu

EPS, ROPE = 1e-6, 64


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    arrays = jax.ShapeDtypeStruct((1, 64, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, 64), jnp.bfloat16)
    if reasons := tsmla_jax.explain("indexer_quantize", *arrays).reasons["cute"]:
        pytest.skip("; ".join(reasons))


class Layer:
    """Sequences whose tokens come in steps, and the caches that both implementations fill."""

    def __init__(self, kind: str, ratio: int, overlap: bool, channels: int, spare: int = 0) -> None:
        self.kind, self.ratio, self.overlap, self.channels = kind, ratio, overlap, channels
        rng = self.rng = np.random.default_rng(ratio + channels)
        width = channels * (2 if overlap else 1)
        self.ape = jnp.asarray(rng.standard_normal((ratio, width)), jnp.float32)
        self.weight = jnp.asarray(rng.uniform(0.5, 1.5, channels), jnp.bfloat16)
        turn = rng.uniform(0, 2 * np.pi, (4096, ROPE // 2)).astype(np.float32)
        self.cos_sin = jnp.concatenate([jnp.cos(turn), jnp.sin(turn)], axis=1)
        self.pages, self.width, self.spare = 64, width, spare

    def empty(self) -> Any:
        shape = (self.pages, 16)
        if self.kind == "v4":
            return sparse.init_v4_cache(self.pages, layout="packed", cache_dtype="fp8")
        if self.kind == "indexer":
            return jnp.zeros((*shape, self.channels + 4), jnp.uint8)
        return jnp.zeros((*shape, self.channels), self.kind)

    def run(self, steps: list[tuple[list[int], list[int]]]) -> dict[str, tuple[Any, ...]]:
        """(cache, state, positions) of the kernel in jax, and of torch's definition, after the steps. A step is
        (lengths with the new tokens, new tokens) of all requests."""
        requests = len(steps[0][0])
        slots = jnp.asarray(self.rng.permutation(requests + 2)[:requests], jnp.int32)
        tables = jnp.asarray(self.rng.permutation(self.pages).reshape(requests, -1), jnp.int32)
        state = sparse.init_compressor_state(
            requests + 2, ratio=self.ratio, channels=self.channels, overlap=self.overlap, spare=self.spare
        )
        cache = self.empty()
        mine = [empty_on_torch(x) for x in (cache, *state)]
        options: dict[str, Any] = {"ratio": self.ratio, "overlap": self.overlap, "eps": EPS}
        if self.kind == "float8_e4m3fn":
            options["kv_scale"] = 0.037
        call = jax.jit(functools.partial(tsmla_jax.compress_write_kv_cache, implementation="cute", **options))
        fixed = (self.weight, self.cos_sin, tables)
        for lens, new in steps:
            kv_score = jnp.asarray(self.rng.standard_normal((sum(new) + 3, 2, self.width)), jnp.float32)
            where = {
                "state_slots": slots,
                "seq_lens": jnp.asarray(lens, jnp.int32),
                "cu_seqlens_q": jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32),
            }
            cache, state = call(cache, kv_score, self.ape, state, *fixed, **where)
            tsmla_bridge.compress_write_kv_cache(
                mine[0],
                *map(on_torch, (kv_score, self.ape)),
                *mine[1:],
                *map(on_torch, fixed),
                **{name: on_torch(x) for name, x in where.items()},
                **options,
                implementation="reference",
            )
        numbers = [x.float() if x.dtype in (torch.bfloat16, torch.float8_e4m3fn) else x for x in mine]
        held = [np.asarray(x.cpu()) for x in numbers]
        return {"cute": (np.asarray(cache), *state), "reference": tuple(held)}

    def values(self, cache: Any) -> np.ndarray:
        """The values of a cache, in float32."""
        if self.kind == "v4":
            rows = 64 * 576
            data = jnp.asarray(cache)[:, :rows].reshape(-1, 576)
            scales = jnp.asarray(cache)[:, rows : rows + 64 * 8].reshape(-1, 8)
            assert not np.asarray(scales)[:, 7].any()
            return np.where(np.asarray(scales)[:, :1] == 0, 0, np.asarray(sparse.unpack_v4_rows(data, scales)))
        if self.kind == "indexer":
            return np.nan_to_num(unpacked_keys(cache)[0])
        return np.asarray(cache, np.float32)


def on_torch(x: jax.Array) -> torch.Tensor:
    """A copy on torch's side of the GPU, bfloat16 as float32."""
    return torch.from_numpy(np.array(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x)).cuda()


def empty_on_torch(x: jax.Array) -> torch.Tensor:
    """A copy of an array of one value, of any dtype."""
    value = float(x.reshape(-1)[0])
    return torch.full(x.shape, value, dtype=getattr(torch, x.dtype.name), device="cuda")


def steps_of(prefill: list[int], decoded: int, each: int = 1) -> list[tuple[list[int], list[int]]]:
    """Prefill, a second chunk of about half of it, then decode steps."""
    chunk = [n // 2 for n in prefill]
    lens = [a + b for a, b in zip(prefill, chunk, strict=True)]
    steps = [(prefill, prefill), (lens, chunk)]
    for _ in range(decoded):
        lens = [n + each for n in lens]
        steps.append((lens, [each] * len(lens)))
    return steps


CASES = [
    ("v4", 4, True, 512),
    ("indexer", 4, True, 128),
    ("v4", 128, False, 512),
    ("bfloat16", 4, True, 512),
    ("float32", 4, True, 128),
    ("float8_e4m3fn", 128, False, 512),
    ("float16", 8, False, 256),
]


@pytest.mark.parametrize(
    ("kind", "ratio", "overlap", "channels", "each"), [*((*case, 1) for case in CASES), (*CASES[0], 3), (*CASES[2], 3)]
)
def test_as_the_reference(kind: str, ratio: int, overlap: bool, channels: int, each: int) -> None:
    layer = Layer(kind, ratio, overlap, channels, spare=each - 1)
    held = layer.run(steps_of([1, 5, 130, 0, 17, 400, 3, 64], 9, each))
    (cache, *state), (wanted, *want) = held["cute"], held["reference"]
    for a, b in zip(state, want, strict=True):
        np.testing.assert_array_equal(a, b)
    got, reference = layer.values(cache), layer.values(wanted)
    assert np.abs(reference).max() > 0.5
    # A value that lies between two numbers of the cache's dtype may go to the other one. Pooling and rotating add and
    # subtract numbers of about 1, so that small results are as far off as those.
    step = {"float32": 2.0**-18, "bfloat16": 2.0**-7, "float16": 2.0**-10}.get(kind, 1.01 / 8)
    np.testing.assert_allclose(got, reference, rtol=step, atol=2.0**-18 if kind == "float32" else step * 2.0**-6)
    if kind != "float32":
        assert np.mean(got != reference) < 0.01


def test_one_call_or_many_give_the_same_bytes() -> None:
    whole, parts = (Layer("v4", 4, True, 512) for _ in range(2))
    rng = np.random.default_rng(0)
    kv_score = jnp.asarray(rng.standard_normal((61, 2, 1024)), jnp.float32)
    caches = []
    for layer, cuts in ((whole, [61]), (parts, [7, 8, 9, 30, 61])):
        state = sparse.init_compressor_state(1, ratio=4, channels=512, overlap=True)
        cache, begin = layer.empty(), 0
        for end in cuts:
            cache, state = tsmla_jax.compress_write_kv_cache(
                cache,
                kv_score[begin:end],
                layer.ape,
                state,
                layer.weight,
                layer.cos_sin,
                jnp.zeros((1, 1), jnp.int32),
                state_slots=jnp.zeros(1, jnp.int32),
                seq_lens=jnp.asarray([end], jnp.int32),
                cu_seqlens_q=jnp.asarray([0, end - begin], jnp.int32),
                ratio=4,
                overlap=True,
                eps=EPS,
                implementation="cute",
            )
            begin = end
        caches.append((np.asarray(cache), *map(np.asarray, state)))
    for a, b in zip(*caches, strict=True):
        np.testing.assert_array_equal(a, b)
