"""The rows of the grid in test_transforms.py: the operations with kernels, their operands, and what jax's
transformations make of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.jax.ops import prefill_calls
from tests.jax.ops.programs import ints
from tests.oracles import sparse as oracle
from tsmla_jax import sparse

Arrays = tuple[jax.Array, ...]
Axes = tuple[int | None, ...]
BF16, F32, FP8 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn


class Split(NamedTuple):
    """Specs of operands over the mesh of 4 "data" and 2 "model", for an operand that is left out P(), and of results.

    mapped: whether a part of them is a call of its own, as under shard_map. moves: the collectives of the program.
    """

    operands: Sequence[P]
    results: Sequence[P]
    mapped: bool = True
    moves: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    """An operation's calls.

    Attributes:
      run: of an implementation's name and options, a function of the operands.
      arrays: of a seed, the operands; those of all seeds have the same shapes.
      shapes: of jax.export, an operand each: its sizes, or symbols of them. portable: those of "xla", if they are
        others: XLA's bitcasts of packed rows take no symbols.
      folded: in_axes of vmaps that are one call of each kernel. in_turn: of those that are calls one after another.
      scale: an option that takes a traced number.
      splits: over devices. gathered: specs that no kernel takes as they are.
      own: the axis of each operand along which devices have calls of their own, by default the first one; None: shared.
      derivative: "both" modes, "reverse", or what the refusal says; empty: there is none to take.
      inputs: operands with derivatives, by default all of 16 or 32 bits.
      kernels: how many a call has. wide: whether the reference computes in float32.
    """

    run: Callable[..., Callable[..., Any]]
    arrays: Callable[[int], Arrays]
    shapes: Sequence[str] = ()
    folded: Sequence[Axes] = ()
    in_turn: Sequence[Axes] = ()
    scale: str = ""
    splits: Mapping[str, Split] = field(default_factory=dict)
    gathered: Sequence[P] = ()
    own: Axes = ()
    derivative: str = ""
    inputs: tuple[int, ...] = ()
    kernels: int = 1
    wide: bool = False
    portable: Sequence[str] | None = None


def named(function: Callable[..., Any], names: str, **fixed: Any) -> Callable[..., Callable[..., Any]]:
    """`Row.run` of an operation: its operands have these names."""

    def run(implementation: str | None, **options: Any) -> Callable[..., Any]:
        given = fixed | options
        return lambda *arrays: function(
            **dict(zip(names.split(), arrays, strict=True)), implementation=implementation, **given
        )

    return run


def drawn(rng: np.random.Generator, *shape: int, dtype: Any = BF16) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


# ---- attention


def decode(ragged: bool, visible: bool = False) -> Row:
    batch, s, heads, width, page, pages = 8, 2, 4, 320, 16, 24
    tokens = (13,) if ragged else (batch, s)  # two rows of padding at the end
    cu_seqlens_q = [(0, 2, 2, 3, 5, 6, 8, 9, 11), (0, 1, 1, 1, 3, 4, 4, 4, 4)]

    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        found = [
            drawn(rng, *tokens, heads, width), drawn(rng, pages, page, width) / 3,
            ints(rng.permutation(pages).reshape(batch, 3)), ints([0, 1 + seed, 17, 48, 33, 2, 16, 40]),
        ]  # fmt: skip
        found += [ints(cu_seqlens_q[seed % 2])] if ragged else []
        return (*found, *([ints(rng.integers(0, 48, tokens))] if visible else []))

    names = "q kv_cache block_tables seq_lens" + " cu_seqlens_q" * ragged + " visible_lens" * visible
    options: dict[str, Any] = {"softmax_scale": 0.135, "latent_dim": 256, "return_lse": True}
    rows, head, data = ("t",) if ragged else ("b", "2"), P(None, "model"), P("data")
    last = (", ".join(rows),) if visible else ()
    shapes = (", ".join((*rows, "4, 320")), "p, 16, 320", "b, m", "b", *(("b + 1",) if ragged else ()), *last)
    if ragged:
        splits = {"heads": Split((head,), (head, head))}
        folded: list[Axes] = [(0, None, None, None, 0, *(0,) * visible), (0,) * len(shapes)]
    else:
        head, both = P(None, None, "model"), P("data", None, "model")
        by = [P()] * visible, [data] * visible
        splits = {
            "heads": Split((head,), (head, head)), "batch": Split((data, P(), data, data, *by[1]), (data, data)),
            "both": Split((both, P(), data, data, *by[1]), (both, both)),
            "queries only": Split((both,), (both, both), mapped=False),
            "tables only": Split((P(), P(), data, data), (data, data), mapped=False),
        }  # fmt: skip
        folded = [(0,) * len(shapes)] if visible else [
            (0, None, None, None), (1, None, None, None), (None, 0, None, None), (None, None, 0, 0), (0, 0, 0, 0),
            (2, 1, None, 1),
        ]  # fmt: skip
    run = named(tsmla_jax.mla_decode, names, **options, **({"max_q_len": 3} if ragged else {}))
    gathered = (P(), P("data")) if ragged else (P(None, None, None, "model"), P("data"))
    refused = r"mla_decode has no derivative .*mla_prefill.*implementation='reference'"
    return Row(run, arrays, shapes, folded, scale="softmax_scale", splits=splits, gathered=gathered, derivative=refused)


def prefill(shared_rope: bool, sinks: bool = False) -> Row:
    make = prefill_calls.layer_arrays if shared_rope else prefill_calls.arrays
    function = tsmla_jax.mla_prefill_kv if shared_rope else tsmla_jax.mla_prefill
    names = ("q kv k_rope" if shared_rope else "q k v") + " cu_seqlens_q cu_seqlens_kv" + " sinks" * sinks
    cu_seqlens_q = [prefill_calls.Q_LENS, (1, 2, 3, 4, 3)]

    def arrays(seed: int) -> Arrays:
        lens = cu_seqlens_q[seed % 2], prefill_calls.KV_LENS
        given = (*(x if seed % 2 == 0 else -x / 2 for x in make()), *map(prefill_calls.offsets, lens))
        return (*given, jnp.asarray([-1.0, 0.0, 1.0, 2.0]) + seed) if sinks else given

    options = {"max_q_len": 5, "max_kv_len": 7, "softmax_scale": 0.07, "return_lse": True, "return_max_logits": sinks}
    heads, offsets, more, rest = P(None, "model"), (P(), P()) * sinks, (None,) * sinks, ("4",) * sinks
    of_sinks = (P("model"),) * sinks
    keys = ("n, 4, 256", "n, 64") if shared_rope else ("n, 4, 192", "n, 4, 128")
    return Row(
        named(function, names, **options), arrays, ("t, 4, 192", *keys, "b + 1", "b + 1", *rest),
        [] if shared_rope else [
            (0, 0, 0, None, None, *more), (1, None, None, None, None, *(0,) * sinks), (None, 0, 2, None, None, *more),
        ],
        [
            (0, 0, 0, 0, 0, *(0,) * sinks), (None, None, None, 0, None, *more),
            *([(None, 0, None, None, None, *more)] if shared_rope else []),
        ],
        scale="softmax_scale",
        splits={
            "heads": Split((heads, heads, P() if shared_rope else heads, *offsets, *of_sinks), (heads,) * (2 + sinks)),
        },
        gathered=(P(None, None, "model"), P(None, None, "data")), derivative="reverse", wide=True,
    )  # fmt: skip


def gradient_of(row: Row, shared_rope: bool) -> Row:
    """The gradients of prefill's operands as an operation: its last operand is the result's cotangent."""

    def run(implementation: str | None, **options: Any) -> Callable[..., Any]:
        def gradients(*arrays: jax.Array) -> Any:
            *floats, cu_seqlens_q, cu_seqlens_kv, d_out = arrays

            def attend(*floats: jax.Array) -> jax.Array:
                out, lse = row.run(implementation, **options)(*floats, cu_seqlens_q, cu_seqlens_kv)
                return out.astype(F32) + jnp.where(lse == -jnp.inf, 0, lse)[..., None] / 3

            return jax.vjp(attend, *floats)[1](d_out)

        return gradients

    def arrays(seed: int) -> Arrays:
        given = row.arrays(seed)
        return (*given, drawn(np.random.default_rng(seed), *given[0].shape[:2], 128, dtype=F32))

    heads, moves = row.splits["heads"], ("all-reduce",) if shared_rope else ()  # of the shared columns' gradient
    return Row(
        run, arrays, (*row.shapes, "t, 4, 128"), [(*axes, None) for axes in row.folded],
        [(*axes, None) for axes in row.in_turn], "softmax_scale",
        {"heads": Split((*heads.operands, P(), P(), heads.operands[0]), heads.operands, not shared_rope, moves)},
        derivative="the gradient of mla_prefill has no derivative in this", inputs=(0, 1, 2), kernels=2, wide=True,
    )  # fmt: skip


def sparse_mla(layout: str) -> Row:
    tokens, heads, selected, window, page = 8, 4, 12, 4, 8
    v4 = layout == "v4"

    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((5, page, 576))
        if layout == "v32":
            packed = b"".join(oracle.v32_row(row[:512], row[512:]) for row in rows.reshape(-1, 576))
            caches = [np.frombuffer(packed, np.uint8).reshape(5, page, 656)]
        elif layout == "plain":
            caches = [oracle.e4m3(rows * 9)]
        else:
            pages = np.stack([np.frombuffer(oracle.v4_page(x[:, :512], page), np.uint8) for x in rows])
            caches = [pages, pages[2:]]
        # -1, duplicates, no key at all, and an illegal slot behind the lengths
        indices = rng.integers(-1, 5 * page, (tokens, selected))
        indices[:, window:] = rng.integers(-1, 3 * page, (tokens, selected - window))
        indices[3], indices[4, 7:] = -1, 2**31 - 1
        q = drawn(rng, tokens, heads, 512 if v4 else 576)
        given = (q, *map(jnp.asarray, caches), ints(indices), ints([12, 0, 3, 12, 7, 12, 1, 12]))
        return (*given, drawn(rng, heads)) if v4 else given

    names = "q kv_cache compressed_kv_cache indices lengths sinks" if v4 else "q kv_cache indices lengths"
    options: dict[str, Any] = {"softmax_scale": 0.135, "return_lse": True}
    if v4:
        options |= {"window": window, "page_size": page, "compressed_page_size": page, "return_max_logits": True}
    elif layout == "plain":
        options |= {"kv_scale": 1 / 9}
    whole, data, head, both = [P()] * (1 + v4), P("data"), P(None, "model"), P("data", "model")
    sinks = [P("model")] * v4
    pages = ["p, 5184", "n, 5184"] if v4 else [f"p, 8, {656 if layout == 'v32' else 576}"]
    splits = {
        "heads": Split((head, *whole, P(), P(), *sinks), (head,) * (2 + v4)),
        "tokens": Split((data, *whole, data, data), (data,) * (2 + v4)),
        "both": Split((both, *whole, data, data, *sinks), (both,) * (2 + v4)),
        "indices only": Split((P(), *whole, data), (data,) * (2 + v4), mapped=False),
    }
    folded: dict[str, Sequence[Axes]] = {
        "v32": [(0, None, None, None), (0, 0, 0, None)],
        "v4": [(None, None, None, 0, 0, None), (None, 0, None, None, None, None), (0, 0, 0, 0, None, None)],
        "plain": [(None, 0, None, None)],
    }
    return Row(
        named(tsmla_jax.sparse_mla, names, **options), arrays,
        (f"t, 4, {512 if v4 else 576}", *pages, "t, 12", "t", *(["4"] if v4 else [])), folded[layout],
        [(None, None, None, None, None, 0)] if v4 else [], "softmax_scale", splits,
        (P(None, None, "model"), P(None, "data")), (0, 0, 0, 0, 0, None) if v4 else (),
        derivative=r"sparse_mla has no derivative .* implementation='reference'",
        portable=None if layout == "plain" else (),
    )  # fmt: skip


def merge() -> Row:
    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        outs, lses = rng.normal(size=(3, 8, 4, 16)), rng.normal(size=(3, 8, 4)) * 3
        # a part without keys, and a row that no part saw
        lses[0, 1], outs[0, 1], lses[:, 2], outs[:, 2] = -np.inf, np.nan, -np.inf, np.nan
        return jnp.asarray(outs, F32), jnp.asarray(lses, F32)

    def of_rows(*axes: Any) -> Split:
        return Split((P(None, *axes), P(None, *axes)), (P(*axes), P(*axes)))

    splits = {"both": of_rows("data", "model"), "rows": of_rows(("data", "model")), "heads": of_rows(None, "model")}
    return Row(
        named(tsmla_jax.merge_attention_states, "outs lses"), arrays, ("3, t, 4, 16", "3, t, 4"),
        [(0, 0), (1, 1), (2, 2)], splits=splits, own=(1, 1), derivative="reverse",
    )  # fmt: skip


# ---- caches

PAGES, PAGE, LATENT, ROPE, TOKENS, HEADS = 8, 16, 32, 16, 6, 4


def cache_op(op: str) -> Row:
    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        cache = drawn(rng, PAGES, PAGE, LATENT + ROPE)
        if op == "gather_kv_cache":
            tables = ints(rng.integers(0, PAGES, (4, 3))).at[1, 2].set(2**31 - 1)
            # the last operand's size is that of the result
            return cache, tables, ints([5, 0, 47, 16]), ints([20, 9 + seed, 1, 0]), jnp.zeros(40, jnp.int32)
        rows = drawn(rng, TOKENS, LATENT, dtype=F32), drawn(rng, TOKENS, ROPE, dtype=F32)
        slots = ints([PAGES * PAGE - 1, -1, 3, PAGES * PAGE, -(2**31), 40 + seed])
        if op == "write_kv_cache":
            return cache, *rows, slots
        heads = drawn(rng, TOKENS, HEADS, LATENT, dtype=F32), drawn(rng, TOKENS, HEADS, ROPE, dtype=F32)
        return cache, *heads, *rows, slots, *(drawn(rng, TOKENS, ROPE // 2, dtype=F32) for _ in range(2))

    names = {"write_kv_cache": "kv_cache latent k_rope slot_mapping",
             "rope_write_kv_cache": "kv_cache q_nope q_rope latent k_rope slot_mapping cos sin",
             "gather_kv_cache": "kv_cache block_tables starts lens rows"}[op]  # fmt: skip
    rows = ("t, 32", "t, 16", "t")
    shapes = {"write_kv_cache": rows, "rope_write_kv_cache": ("t, 4, 32", "t, 4, 16", *rows, "t, 8", "t, 8"),
              "gather_kv_cache": ("b, m", "b", "b", "n")}[op]  # fmt: skip
    own = {"q_dtype": "bfloat16"} if op == "rope_write_kv_cache" else {}

    def gather(rows: jax.Array, **given: Any) -> jax.Array:
        return tsmla_jax.gather_kv_cache(**given, total_len=rows.shape[0])

    function = gather if op == "gather_kv_cache" else getattr(tsmla_jax, op)
    count = len(names.split())
    pages, heads = P("data"), P(None, "model")
    splits: dict[str, Split] = {}
    if op == "write_kv_cache":
        splits = {str(x): Split((x,), (x,), mapped=False) for x in (P(), pages, P(("data", "model")), P("model"))}
        gathered = [P(None, None, "model"), P(None, "model")]
    elif op == "rope_write_kv_cache":
        splits = {"pages and heads": Split((pages, heads, heads), (heads, pages), mapped=False),
                  "heads": Split((P(), heads, heads), (heads, P()), mapped=False)}  # fmt: skip
        gathered = [P(None, "data"), P(None, None, "model")]
    else:
        gathered = [pages, pages, pages, pages]
    return Row(
        named(function, names, kv_scale=0.7, **own), arrays, ("p, 16, 48", *shapes),
        [(0,) * count, (0, *(None,) * (count - 1)), (None, *(0,) * (count - 1))], scale="kv_scale", splits=splits,
        gathered=gathered, derivative="both",
    )  # fmt: skip


def packed_op(op: str) -> Row:
    rotations: dict[str, dict[str, Any]] = {
        "write_packed_kv_cache": {"rope_interleave": False},
        "write_indexer_cache": {"rope_offset": 64, "rope_layout": "interleaved"},
        "indexer_quantize": {"rope_offset": 0, "rope_layout": "halves"},
    }
    names, shapes = {
        "write_packed_kv_cache": ("kv_cache latent k_rope slot_mapping", ("p, 16, 656", "t, 512", "t, 64", "t")),
        "write_indexer_cache": ("k_cache k slot_mapping", ("p, 16, 132", "t, 128", "t")),
        "indexer_quantize": ("q weights", ("t, 4, 128", "t, 4")),
    }[op]

    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        turn = tuple(drawn(rng, 8, 32, dtype=F32) for _ in range(2))
        if op == "indexer_quantize":
            return drawn(rng, 8, HEADS, 128), drawn(rng, 8, HEADS), *turn
        slots = ints(rng.permutation(4 * PAGE)[:8]).at[1].set(-1)
        packed = op == "write_packed_kv_cache"
        cache = jnp.asarray(rng.integers(0, 256, (4, PAGE, 656 if packed else 132), np.uint8))
        rows = (drawn(rng, 8, 512), drawn(rng, 8, 64)) if packed else (drawn(rng, 8, 128),)
        return cache, *rows, slots, *turn

    writes, data = op != "indexer_quantize", P("data")
    split = Split((data,), (data,), mapped=False) if writes else Split((data,) * 4, (data, data))
    return Row(
        named(getattr(sparse, op), f"{names} cos sin", **rotations[op]), arrays, (*shapes, "t, 32", "t, 32"),
        [(0,) * len(arrays(0))], splits={"pages" if writes else "tokens": split},
        derivative="" if writes else "reverse", inputs=() if writes else (1,), portable=() if writes else None,
    )  # fmt: skip


# ---- the indexer, products


def logits(ragged: bool, k: int | None = None) -> Row:
    """indexer_logits of four tokens, or with k indexer_topk."""
    tokens, heads, dim, pages, size = 4, 8, 128, 5, 16
    rows = 2 if ragged else tokens

    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        found = (
            jnp.asarray(rng.integers(-2, 3, (tokens, heads, dim)), FP8), drawn(rng, tokens, heads, dtype=F32),
            ints(rng.integers(0, pages, (rows, 2))), ints(rng.integers(0, 2 * size + 1, rows)),
            *([ints([0, 1, tokens])] if ragged else []), jnp.asarray(rng.integers(-1, 2, (pages, size, dim)), FP8),
        )  # fmt: skip
        return found

    names = "q weights block_tables seq_lens" + " cu_seqlens_q" * ragged + " k_cache"
    data, count = P("data"), 5 + ragged
    split = Split((data,) * 4, (data,) * (1 if k is None else 2))
    requests = ("r", "r + 1") if ragged else ("t",)
    run = named(tsmla_jax.indexer_logits, names) if k is None else named(
        tsmla_jax.indexer_topk, names, k=k, return_slots=True
    )  # fmt: skip
    shapes = ("t, 8, 128", "t, 8", f"{requests[0]}, 2", *requests, "p, 16, 128")
    static = ("4, 8, 128", "4, 8", f"{rows}, 2", str(rows), *(["3"] if ragged else []), "p, 16, 128")
    return Row(
        run, arrays, shapes if k is None else static,
        [] if ragged else [(0,) * (count - 1) + (None,)], [] if k is not None else [(0,) * count],
        splits={} if ragged else {"tokens": split}, gathered=(data, data) if ragged else (),
        derivative="" if k is not None else "both", inputs=(1,), kernels=1 if k is None else 2, portable=shapes,
    )  # fmt: skip


def topk(bits: bool = False) -> Row:
    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        return drawn(rng, 4, 9, dtype=F32), ints(rng.integers(0, 10, 4))

    data = P("data")
    return Row(
        named(tsmla_jax.select_topk, "logits seq_lens", k=4, order="position", return_bits=bits), arrays, ("t, 9", "t"),
        [(0, 0), (0, None), (None, 0)], splits={"rows": Split((data, data), (data,))}, derivative="reverse",
    )  # fmt: skip


def product(grouped: bool, gated: bool = False) -> Row:
    """gated: with a limit, and the rows of a grouped product picked."""
    rows, columns, terms, groups = 12, 512, 336, (3,) if grouped else ()

    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        found = (
            drawn(rng, rows, terms, dtype=FP8), drawn(rng, *groups, columns, terms, dtype=FP8),
            jnp.asarray(rng.uniform(0.5, 2, (rows, 3)), F32),
            jnp.asarray(rng.uniform(0.5, 2, (*groups, 4, 3)) / (30 if gated else 1), F32),
        )  # fmt: skip
        picked = (ints([*rng.integers(0, rows, 9), -1]),) if gated else ()
        return (*found, ints([0, 2, 2, 9]), *picked) if grouped else found

    stack = (None,) if grouped else ()
    rows_of, columns_of = P(None if grouped else "data"), P(*stack, "model")
    last = [P()] if grouped else []
    out = P(None if grouped else "data", "model")
    splits = {"rows and columns": Split((rows_of, columns_of, rows_of, columns_of, *last), (out,))}
    if gated:
        splits = {} if grouped else {"rows": Split((rows_of, P(), rows_of), (rows_of,))}
    function = tsmla_jax.grouped_block_scaled_matmul if grouped else tsmla_jax.block_scaled_matmul
    names = "x weight x_scales weight_scales" + " cu_rows" * grouped + " rows" * (grouped and gated)
    form = {"gated": True, "limit": 4.0} if gated else {}
    weights = ("3, 512, 336", "3, 4, 3") if grouped else ("512, 336", "4, 3")
    more = ((0, 0) if gated else (0,)) if grouped else ()
    return Row(
        named(function, names, **form), arrays, ("t, 336", weights[0], "t, 3", weights[1], *("4", "r")[: len(more)]),
        [] if grouped else [(0, None, 0, None)], [(0, 0, 0, 0, *more), *[(None, None, None, None, *more)] * grouped],
        splits=splits, own=(0, None, 0, None, *more),
        derivative=rf"^{function.__name__} has no derivative .*'reference'", inputs=(2,),
    )  # fmt: skip


def mxfp4_product(grouped: bool) -> Row:
    """Of bfloat16 and weights of e2m1."""
    rows, columns, terms, groups = 12, 512, 384, (3,) if grouped else ()

    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        found = (
            drawn(rng, rows, terms), jnp.asarray(rng.integers(0, 256, (*groups, columns, terms // 2)), jnp.uint8),
            jnp.asarray(rng.integers(120, 126, (*groups, columns, terms // 32)), jnp.uint8),
        )  # fmt: skip
        return (*found, ints([0, 2, 2, 9])) if grouped else found

    rows_of, columns_of = P(None if grouped else "data"), P(*(None,) * len(groups), "model")
    last = [P()] if grouped else []
    split = Split((rows_of, columns_of, columns_of, *last), (P(None if grouped else "data", "model"),))
    function = tsmla_jax.grouped_block_scaled_matmul if grouped else tsmla_jax.block_scaled_matmul
    names = "x weight weight_scales" + " cu_rows" * grouped
    weights = ("3, 512, 192", "3, 512, 12") if grouped else ("512, 192", "512, 12")
    more = (0,) if grouped else ()
    return Row(
        named(function, names, x_scales=None), arrays, ("t, 384", *weights, *("4",)[: len(more)]),
        [] if grouped else [(0, None, None)], [(0, 0, 0, *more)], splits={"rows and columns": split},
        own=(0, None, None, *more), derivative=rf"^{function.__name__} has no derivative .*'reference'", inputs=(0,),
    )  # fmt: skip


def plain_product() -> Row:
    """Of bfloat16 and weights of bfloat16, of groups alone."""

    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        return drawn(rng, 12, 384), drawn(rng, 3, 512, 384), ints([0, 2, 2, 9])

    columns_of = P(None, "model")
    split = Split((P(), columns_of, P()), (columns_of,))
    names = "x weight cu_rows"
    return Row(
        named(tsmla_jax.grouped_block_scaled_matmul, names, x_scales=None, weight_scales=None), arrays,
        ("t, 384", "3, 512, 384", "4"), [], [(0, 0, 0)], splits={"columns": split}, own=(0, None, 0),
        derivative=r"^grouped_block_scaled_matmul has no derivative .*'reference'", inputs=(0,),
    )  # fmt: skip


def quantize() -> Row:
    data = P("data")
    return Row(
        named(tsmla_jax.quantize_blocks, "x"), lambda seed: (drawn(np.random.default_rng(seed), 4, 3, 264),),
        ("t, 3, 264",), [(0,), (1,)], splits={"rows": Split((data,), (data, data))},
    )  # fmt: skip


def bits() -> Row:
    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        return ints(rng.integers(-1, 40, (8, 5))), ints(rng.integers(0, 6, 8)), ints(rng.integers(0, 9, 8))

    data = P("data")
    return Row(
        named(tsmla_jax.selection_bits, "positions lengths starts", num_keys=30), arrays, ("t, 5", "t", "t"),
        [(0, 0, 0), (1, None, None), (None, 0, None)], splits={"rows": Split((data,) * 3, (data,))},
    )  # fmt: skip


def compress() -> Row:
    def run(implementation: str | None, **options: Any) -> Callable[..., Any]:
        def call(cache: jax.Array, kv_score: jax.Array, ape: jax.Array, rows: jax.Array, kept: jax.Array,
                 weight: jax.Array, cos_sin: jax.Array, tables: jax.Array, *where: jax.Array) -> Any:  # fmt: skip
            named = dict(zip(("state_slots", "seq_lens", "cu_seqlens_q"), where, strict=True))
            written, state = tsmla_jax.compress_write_kv_cache(
                cache, kv_score, ape, sparse.CompressorState(rows, kept), weight, cos_sin, tables, **named, ratio=4,
                overlap=True, eps=1e-6, implementation=implementation, **options,
            )  # fmt: skip
            return written, *state

        return call

    def arrays(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        state = sparse.init_compressor_state(2, ratio=4, channels=512, overlap=True)
        shared = np.random.default_rng(9)
        return (
            drawn(rng, 2, 16, 512), drawn(rng, 9, 2, 1024, dtype=F32), drawn(shared, 4, 1024, dtype=F32), *state,
            drawn(shared, 512, dtype=F32), drawn(shared, 12, 64, dtype=F32), ints([[1], [0]]), ints([0, 1]),
            ints([8 - seed % 2, 1]), ints([0, 8 - seed % 2, 9 - seed % 2]),
        )  # fmt: skip

    shapes = ("p, 16, 512", "t, 2, 1024", "4, 1024", "n, 8, 2, 1024", "n, 8", "512", "12, 64", "b, m", "b", "b",
              "b + 1")  # fmt: skip
    own = (0, 0, None, 0, 0, None, None, 0, 0, 0, 0)
    return Row(run, arrays, shapes, in_turn=[own, (0,) * 11], own=own, portable=())


PREFILL = {"mla_prefill": prefill(shared_rope=False), "mla_prefill_kv": prefill(shared_rope=True)}
SINKS = {f"{name}-sinks": prefill(name == "mla_prefill_kv", sinks=True) for name in PREFILL}
ROWS: dict[str, Row] = {
    "mla_decode": decode(ragged=False), "mla_decode-ragged": decode(ragged=True),
    "mla_decode-visible": decode(ragged=False, visible=True),
    "mla_decode-ragged-visible": decode(ragged=True, visible=True),
    **PREFILL, **SINKS,
    **{f"{name}-gradient": gradient_of(row, name == "mla_prefill_kv") for name, row in PREFILL.items()},
    **{f"sparse_mla-{layout}": sparse_mla(layout) for layout in ("v32", "v4", "plain")},
    "merge_attention_states": merge(),
    **{op: cache_op(op) for op in ("write_kv_cache", "rope_write_kv_cache", "gather_kv_cache")},
    **{op: packed_op(op) for op in ("write_packed_kv_cache", "write_indexer_cache", "indexer_quantize")},
    "indexer_logits": logits(ragged=False), "indexer_logits-ragged": logits(ragged=True), "select_topk": topk(),
    "select_topk-bits": topk(bits=True),
    "indexer_topk": logits(ragged=False, k=6), "indexer_topk-ragged": logits(ragged=True, k=6),
    "block_scaled_matmul": product(grouped=False), "grouped_block_scaled_matmul": product(grouped=True),
    "block_scaled_matmul-gated": product(grouped=False, gated=True),
    "grouped_block_scaled_matmul-gated": product(grouped=True, gated=True),
    "block_scaled_matmul-mxfp4": mxfp4_product(grouped=False),
    "grouped_block_scaled_matmul-mxfp4": mxfp4_product(grouped=True),
    "grouped_block_scaled_matmul-plain": plain_product(),
    "quantize_blocks": quantize(), "selection_bits": bits(), "compress_write_kv_cache": compress(),
}  # fmt: skip


@functools.cache
def arrays_of(op: str, seed: int = 0) -> Arrays:
    return ROWS[op].arrays(seed)


def widened(op: str, given: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands as the reference takes them."""
    return [x.astype(F32) if ROWS[op].wide and x.dtype == BF16 else x for x in given]


def reference(op: str, given: Sequence[jax.Array], **options: Any) -> Any:
    """The reference's results."""
    run = _compiled(op) if not options else jax.jit(lambda given, options: ROWS[op].run("reference", **options)(*given))
    return jax.tree.map(np.asarray, run(widened(op, given), options))


@functools.cache
def _compiled(op: str) -> Callable[..., Any]:
    return jax.jit(lambda given, _: ROWS[op].run("reference")(*given))


@functools.cache
def wanted(op: str) -> Any:
    """The reference's results on arrays_of(op)."""
    return reference(op, arrays_of(op))
