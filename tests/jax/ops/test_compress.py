"""V4's compressor: its definition, and that no split of a sequence into calls shows in a single bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec

import tsmla_jax
from tests.jax.ops.programs import ints, placed
from tests.oracles import sparse as oracle
from tsmla_jax import sparse

EPS = 1e-6
INV_FREQ = (1e4 ** (-np.arange(32) / 32)).astype(np.float32)
KINDS = {4: True, 128: False}


class Problem:
    """Two sequences of one layer, and the calls that feed chunks of them into a state and a cache."""

    def __init__(self, ratio: int, channels: int, length: int, layout: str, spare: int = 0) -> None:
        self.ratio, self.channels, self.overlap = ratio, channels, KINDS.get(ratio, False)
        rng = np.random.default_rng(ratio)
        width = channels * (2 if self.overlap else 1)
        self.x = rng.standard_normal((2, length, 2, width)).astype(np.float32) * 2
        self.ape = rng.standard_normal((ratio, width)).astype(np.float32)
        self.weight = rng.standard_normal(channels).astype(np.float32)
        self.table = sparse.rope_table(INV_FREQ, length + ratio)
        self.layout, self.spare = layout, spare
        self.pages = -(-(length // ratio) // 8)
        self.step = jax.jit(self._step, static_argnames="implementation")

    def _step(
        self,
        x: jax.Array,
        state: sparse.CompressorState,
        cache: jax.Array,
        seq_lens: jax.Array,
        cu: jax.Array,
        implementation: str | None = None,
    ) -> tuple[sparse.CompressorState, jax.Array]:
        entries, state = tsmla_jax.compress_kv(
            x,
            self.ape,
            state,
            state_slots=ints([2, 0]),
            seq_lens=seq_lens,
            cu_seqlens_q=cu,
            ratio=self.ratio,
            overlap=self.overlap,
            implementation=implementation,
        )
        rows = sparse.norm_rope(entries.kv, self.weight, entries.positions * self.ratio, self.table, eps=EPS)
        slots = jnp.where(entries.positions >= 0, entries.requests * self.pages * 8 + entries.positions, -1)
        return state, sparse.write_v4_cache(cache, rows, slots, page_size=8)

    def empty(self) -> tuple[sparse.CompressorState, jax.Array]:
        state = sparse.init_compressor_state(
            3, ratio=self.ratio, channels=self.channels, overlap=self.overlap, spare=self.spare
        )
        if self.layout == "float32":
            return state, jnp.zeros((2 * self.pages, 8, self.channels), jnp.float32)
        packed = self.layout == "packed"
        cache_dtype = "fp8" if packed else self.layout
        layout = "packed" if packed else "plain"
        return state, sparse.init_v4_cache(2 * self.pages, layout=layout, cache_dtype=cache_dtype, page_size=8)

    def run(
        self, calls: list[tuple[int, int]], implementation: str | None = None, rows: int | None = None
    ) -> tuple[np.ndarray, ...]:
        """State and cache, as bytes, after calls with these numbers of tokens a sequence; `rows` pads every call."""
        state, cache = self.empty()
        done = [0, 0]
        for counts in calls:
            x = np.concatenate([self.x[r, done[r] : done[r] + n] for r, n in enumerate(counts)])
            if rows is not None:
                x = np.concatenate([x, np.full((rows - len(x), *x.shape[1:]), np.nan, np.float32)])
            done = [a + n for a, n in zip(done, counts, strict=True)]
            cu = ints([0, counts[0], sum(counts)])
            state, cache = self.step(x, state, cache, ints(done), cu, implementation=implementation)
        return tuple(np.asarray(a).view(np.uint8) for a in (state.kv_score, state.positions, cache))


@functools.cache
def problem(ratio: int, channels: int, length: int, layout: str, spare: int = 0) -> Problem:
    return Problem(ratio, channels, length, layout, spare)


def same(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...]) -> None:
    for name, a, b in zip(("kv_score", "positions", "cache"), got, want, strict=True):
        assert np.array_equal(a, b), name


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(("ratio", "channels"), [(4, 128), (128, 64)])
def test_against_the_definition(ratio: int, channels: int, implementation: str) -> None:
    p = problem(ratio, channels, 260, "float32")
    _, _, cache = p.run([(260, 250)], implementation)
    cache = cache.view(np.float32).reshape(2, p.pages * 8, channels)
    for r, n in enumerate((260, 250)):
        pooled = oracle.compress(p.x[r, :n, 0], p.x[r, :n, 1], p.ape, ratio, p.overlap)
        assert len(pooled) == n // ratio
        want = [oracle.norm_rope(e, p.weight, i * ratio, INV_FREQ, EPS) for i, e in enumerate(pooled)]
        np.testing.assert_allclose(cache[r, : len(pooled)], want, rtol=1e-4, atol=2e-5)
        assert (cache[r, len(pooled) :] == 0).all()


@pytest.mark.usefixtures("optimised_compilation")
@settings(max_examples=10)
@given(data=st.data())
@pytest.mark.parametrize(
    ("ratio", "channels", "layout"), [(4, 512, "packed"), (4, 128, "float32"), (128, 512, "float8_e4m3fn")]
)
@pytest.mark.sampled(3)
def test_no_split_shows_in_a_bit(ratio: int, channels: int, layout: str, data: st.DataObject) -> None:
    length = 24 if ratio == 4 else 260
    p = problem(ratio, channels, length, layout)
    sizes = st.sampled_from([0, 1, 2, 5, 8] if ratio == 4 else [0, 1, 90, 127])
    left, calls = [length, length], []
    while any(left):
        counts = tuple(min(n, data.draw(sizes)) for n in left)
        if not any(counts):  # whoever has tokens left takes one
            counts = tuple(min(n, 1) for n in left)
        left = [n - c for n, c in zip(left, counts, strict=True)]
        calls.append(counts)
    # Calls padded to one size: the sequences' split varies, the compiled program does not.
    same(p.run(calls, rows=16 if ratio == 4 else 2 * 127), p.run([(length, length)]))


@pytest.mark.usefixtures("optimised_compilation")
@pytest.mark.parametrize(("ratio", "channels"), [(4, 128), (128, 64)])
def test_no_compiled_size_shows_in_a_bit(ratio: int, channels: int) -> None:
    # The other way round: programs of many sizes, so that a size whose code rounds differently is found.
    length = 28 if ratio == 4 else 260
    p = problem(ratio, channels, length, "float32")
    whole = p.run([(length, length)])
    same(p.run([(1, 1)] * length), whole)
    same(p.run([(length, 0), (0, length)]), whole)
    if ratio == 4:
        same(p.run([(3, 3), (25, 25)]), whole)


def test_tokens_can_be_taken_back_within_the_spare_rows() -> None:
    p = problem(4, 128, 24, "float32", spare=5)
    state, cache = p.empty()
    x = p.x

    def feed(first: int, last: int, state: sparse.CompressorState, cache: jax.Array, noise: float) -> tuple:
        rows = np.concatenate([x[0, first:last], x[1, first:last]]) + np.float32(noise)
        n = last - first
        return p.step(rows, state, cache, ints([last, last]), ints([0, n, 2 * n]))

    state, cache = feed(0, 5, state, cache, 0)
    state, cache = feed(5, 10, state, cache, 0)
    state, cache = feed(10, 15, state, cache, 1.0)  # rejected drafts
    for first in range(10, 24):
        state, cache = feed(first, first + 1, state, cache, 0)
    want = p.run([(5, 5)] * 4 + [(1, 1)] * 4)
    assert np.array_equal(np.asarray(state.kv_score).view(np.uint8), want[0])
    assert np.array_equal(np.asarray(cache).view(np.uint8), want[2])


def test_entries_and_their_order() -> None:
    p = problem(4, 128, 24, "float32")
    state, _ = p.empty()
    args = {"seq_lens": ints([5, 9]), "cu_seqlens_q": ints([0, 5, 14]), "ratio": 4, "overlap": True}
    x = np.concatenate([p.x[0, :5], p.x[1, :9], p.x[0, :3]])
    run = jax.jit(tsmla_jax.compress_kv, static_argnames=("ratio", "overlap"))
    entries, after = run(x, p.ape, state, state_slots=ints([2, 0]), **args)
    assert entries.kv.shape == (17 // 4 + 2, 128)
    assert entries.requests.tolist() == [0, 1, 1, -1, -1, -1]
    assert entries.positions.tolist() == [0, 0, 1, -1, -1, -1]
    assert (np.asarray(entries.kv)[3:] == 0).all()
    assert after.positions.tolist() == [[8, 1, 2, 3, 4, 5, 6, 7], [-1] * 8, [0, 1, 2, 3, 4, -1, -1, -1]]
    without, untouched = run(x, p.ape, state, state_slots=ints([-1, -1]), **args)
    assert np.array_equal(without.kv, entries.kv)
    assert (np.asarray(untouched.positions) == -1).all()
    none, _ = run(
        x[:0], p.ape, state, state_slots=ints([2]), seq_lens=ints([0]), cu_seqlens_q=ints([0, 0]), ratio=4, overlap=True
    )
    assert none.kv.shape == (0, 128)


def test_shards_of_channels_and_vmap() -> None:
    p = problem(128, 64, 260, "float32")
    state, _ = p.empty()

    def run(x: jax.Array, ape: jax.Array, state: sparse.CompressorState) -> jax.Array:
        entries, _ = tsmla_jax.compress_kv(
            x,
            ape,
            state,
            state_slots=ints([1]),
            seq_lens=ints([260]),
            cu_seqlens_q=ints([0, 260]),
            ratio=128,
            overlap=False,
        )
        return entries.kv

    x = jnp.asarray(p.x[0])
    whole = jax.jit(run)(x, p.ape, state)
    mesh = Mesh(np.asarray(jax.devices()[:2]), "x")
    spec = PartitionSpec
    sharded = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(
            spec(None, None, "x"),
            spec(None, "x"),
            sparse.CompressorState(spec(None, None, None, "x"), spec()),
        ),
        out_specs=spec(None, "x"),
    )
    np.testing.assert_allclose(jax.jit(sharded)(x, p.ape, state), whole, rtol=1e-6, atol=1e-6)
    mapped = jax.jit(jax.vmap(run, in_axes=(0, None, None)))(jnp.stack([x, x]), p.ape, state)
    np.testing.assert_allclose(mapped[1], whole, rtol=1e-6, atol=1e-6)
    explicit = Mesh(np.asarray(jax.devices()[:2]), "x", axis_types=(AxisType.Explicit,))
    given = placed(explicit, jax.tree.leaves((x, p.ape, state)))
    got = jax.jit(lambda x, ape, *state: run(x, ape, sparse.CompressorState(*state)))(*given)
    np.testing.assert_allclose(got, whole, rtol=1e-6, atol=1e-6)


def test_memory_of_a_long_prefill_stays_bounded() -> None:
    shape = jax.ShapeDtypeStruct
    for ratio, width in ((4, 1024), (128, 512)):
        state = jax.eval_shape(
            lambda ratio=ratio: sparse.init_compressor_state(8, ratio=ratio, channels=512, overlap=ratio == 4)
        )
        run = jax.jit(functools.partial(tsmla_jax.compress_kv, ratio=ratio, overlap=ratio == 4), donate_argnums=2)
        compiled = run.lower(
            shape((8192, 2, width), jnp.float32),
            shape((ratio, width), jnp.float32),
            state,
            state_slots=shape((2,), jnp.int32),
            seq_lens=shape((2,), jnp.int32),
            cu_seqlens_q=shape((3,), jnp.int32),
        ).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 64 << 20


def call(**change: object) -> object:
    args: dict[str, object] = {
        "kv_score": jnp.zeros((3, 2, 16)),
        "ape": jnp.zeros((4, 16)),
        "state": sparse.init_compressor_state(2, ratio=4, channels=8, overlap=True),
        "state_slots": ints([1]),
        "seq_lens": ints([3]),
        "cu_seqlens_q": ints([0, 3]),
        "ratio": 4,
        "overlap": True,
    }
    return tsmla_jax.compress_kv(**(args | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_score": jnp.zeros((3, 16))}, "kv_score: got shape"),
        ({"kv_score": jnp.zeros((3, 2, 16), jnp.bfloat16)}, "kv_score: got dtype bfloat16; legal: float32"),
        ({"kv_score": jnp.zeros((3, 2, 15))}, "kv_score: got shape.*multiple of 2"),
        ({"ape": jnp.zeros((3, 16))}, "ape: got shape.*axis 0 must be 4"),
        ({"ratio": 0}, "ratio: got 0"),
        ({"state_slots": ints([1, 2])}, "state_slots: got shape"),
        ({"cu_seqlens_q": ints([0])}, "cu_seqlens_q: got shape"),
        (
            {"state": sparse.init_compressor_state(2, ratio=4, channels=16, overlap=False)},
            "state.kv_score: got a ring of 4 tokens; legal: at least 8",
        ),
        (
            {"state": sparse.CompressorState(jnp.zeros((0, 8, 2, 16)), jnp.zeros((0, 8), jnp.int32))},
            r"state.kv_score: got shape \[0, 8, 2, 16\]; legal: a state for each request under way",
        ),
        ({"state": None}, "^state: got NoneType; legal: a CompressorState"),
        ({"state": (jnp.zeros((2, 8, 2, 16)), jnp.zeros((2, 8), jnp.int32))}, "^state: got tuple; legal: a Compressor"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(**change)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_tokens_of_no_request_complete_no_entry(implementation: str) -> None:
    """The number of results is that of any call of these sizes."""
    state = sparse.init_compressor_state(1, ratio=4, channels=8, overlap=True)
    entries, _ = tsmla_jax.compress_kv(
        jnp.ones((9, 2, 16)), jnp.ones((4, 16)), state, state_slots=ints([]), seq_lens=ints([]), cu_seqlens_q=ints([0]),
        ratio=4, overlap=True, implementation=implementation,
    )  # fmt: skip
    assert entries.kv.shape == (2, 8) and not entries.kv.any()
    assert entries.requests.tolist() == entries.positions.tolist() == [-1, -1]


def test_checks_see_positions_that_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    _, state = call()
    call(state=state, seq_lens=ints([6]))  # 3, 4, 5 follow on 0, 1, 2
    with pytest.raises(ValueError, match="continues at position 5, but its state holds position -1 where 3 belongs"):
        call(state=state, seq_lens=ints([8]))
    with pytest.raises(ValueError, match="continues at position 8"):
        call(seq_lens=ints([11]))
    with pytest.raises(ValueError, match="state_slots: request 0 has state 2; legal: -1, or 0 to 1"):
        call(state_slots=ints([2]))
    with pytest.raises(ValueError, match=r"state_slots: request 0 has no state \(-1\) and continues at position 2"):
        call(state_slots=ints([-1]), seq_lens=ints([5]))
    for state_slots in ([0], [-1]):
        with pytest.raises(ValueError, match="seq_lens: request 0 has length 2 and 3 new tokens"):
            call(seq_lens=ints([2]), state_slots=ints(state_slots))
    for offsets in ([0, 3, 2], [0, 2**31 - 1, -(2**31)]):
        with pytest.raises(ValueError, match="cu_seqlens_q: got"):
            call(seq_lens=ints([3, 3]), state_slots=ints([0, 1]), cu_seqlens_q=ints(offsets))
    with pytest.raises(ValueError, match="requests 0 and 1 both have state 1"):
        call(seq_lens=ints([2, 1]), state_slots=ints([1, 1]), cu_seqlens_q=ints([0, 2, 3]))
