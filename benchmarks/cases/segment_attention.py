"""Attention over packed rows, as a trainer calls it, forward and with its gradient, beside cuDNN's. A point is rows x
tokens, heads, and segments a row. The lengths of segments are random and the same in every run, and a row may end in
padding. Head dims are 192 and 128, masks causal, inputs random normal bf16.

"tsmla" is `nn.segment_attention`, "tsmla_kv" `nn.segment_attention_kv` (which also saves making k, and gets no credit
for that here), "cudnn" jax's private operation with the same segments as its packed layout. cuDNN finds the segments of
v by the head dim of q, so its v is padded to 192 beforehand, and its result is cut. Making offsets of the ids is timed
with ours; cuDNN's lengths and starts are made beforehand. A time is the mean of ten jitted calls by the host's clock,
in the shortest of ten turns. Errors are relative (Frobenius), of tokens that are no padding, against the reference in
float32, on two rows of 512 tokens with 16 heads.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Case, Run, least_seconds
from tsmla_jax.nn import Segments, segment_attention, segment_attention_kv

TURNS, CALLS = 10, 10
QK_DIM, V_DIM, ROPE_DIM = 192, 128, 64
NOPE_DIM, SCALE = QK_DIM - ROPE_DIM, QK_DIM**-0.5
CHECKED = "2x512h16s3"
Attend = Callable[..., jax.Array]


class Shape(NamedTuple):
    """Rows of `length` tokens, heads, and segments a row."""

    rows: int
    length: int
    heads: int
    segments: int

    @classmethod
    def of(cls, name: str) -> Shape:
        """The shape of a name like 4x4096h16s8; ValueError for a text of another form."""
        if not (found := re.fullmatch(r"(\d+)x(\d+)h(\d+)s(\d+)", name)):
            raise ValueError(f"--points: got {name!r}; legal: ROWSxTOKENShHEADSsSEGMENTS, as 4x4096h16s8")
        return cls(*map(int, found.groups()))

    def ids(self) -> np.ndarray:
        """[rows, length] i32: segments 1, 2, ..., then padding of up to a sixteenth of the row."""
        rng = np.random.default_rng(0)
        ids = np.zeros((self.rows, self.length), np.int32)
        for row in ids:
            used = self.length - int(rng.integers(0, self.length // 16 + 1))
            cuts = np.sort(rng.choice(np.arange(1, used), self.segments - 1, replace=False))
            for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, used], strict=True), 1):
                row[start:stop] = number
        return ids


def packed_layout(ids: np.ndarray, max_segments: int) -> tuple[np.ndarray, np.ndarray]:
    """cuDNN's packed layout of rows of ids, 0 for padding, as jax's operation takes it: lengths [B, M] and starts
    [B, M + 1], -1 for no segment."""
    lens, starts = (np.full((len(ids), max_segments + more), -1, np.int32) for more in (0, 1))
    for row, line in enumerate(ids):
        firsts = np.flatnonzero((line != 0) & (np.diff(line, prepend=0) != 0))
        lens[row, : len(firsts)] = [(line == line[first]).sum() for first in firsts]
        starts[row, : len(firsts)] = firsts
    return lens, starts


def ours(function: Attend, shape: Shape, implementation: str) -> Attend:
    """Attention as a function of the operands; each call makes the segments anew."""
    ids = jnp.asarray(shape.ids())

    def attend(*arrays: jax.Array) -> jax.Array:
        segments = Segments.from_ids(ids, max_segments=shape.segments)
        return function(*arrays, segments, softmax_scale=SCALE, implementation=implementation)

    return attend


def cudnn(shape: Shape) -> Attend:
    """cuDNN through jax's private operation: the public one has no argument for where segments begin."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    lens, starts = map(jnp.asarray, packed_layout(shape.ids(), shape.segments))
    segments = {"q_seqlen": lens, "kv_seqlen": lens, "q_offsets": starts, "kv_offsets": starts}
    if shape.segments == 1:
        segments = {name: segments[name][:, 0] for name in ("q_seqlen", "kv_seqlen")}
    options = {**segments, "scale": SCALE, "mask_type": fused.MaskType.PADDING_CAUSAL, "qkv_layout": "BTNH"}
    return lambda *arrays: fused.dot_product_attention(*arrays, **options)[..., :V_DIM]


class Function:
    """A function of arrays, jitted once by itself and once with its gradient for the cotangent d_out."""

    def __init__(self, attend: Attend, arrays: tuple[jax.Array, ...], d_out: jax.Array) -> None:
        def with_gradient(d_out: jax.Array, *arrays: jax.Array) -> Any:
            out, pull = jax.vjp(attend, *arrays)
            return out, pull(d_out)

        self.forward = functools.partial(jax.jit(attend), *arrays)
        self.both = functools.partial(jax.jit(with_gradient), d_out, *arrays)

    def __call__(self) -> Any:
        return self.both()


def functions(shape: Shape, implementation: str = "cute", dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """For the name of each row, a function that makes the `Function` to time."""
    rows, heads = (shape.rows, shape.length), (shape.heads,)
    widths = ((*heads, QK_DIM), (*heads, NOPE_DIM + V_DIM), (ROPE_DIM,))
    keys = jax.random.split(jax.random.key(0), 3)
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    q, kv, k_rope = (draw(key, (*rows, *w)).astype(dtype) for key, w in zip(keys, widths, strict=True))
    rope = jnp.broadcast_to(k_rope[:, :, None], (*rows, *heads, ROPE_DIM))
    k, v = jnp.concatenate([kv[..., :NOPE_DIM], rope], axis=-1), kv[..., NOPE_DIM:]
    used = jnp.asarray(shape.ids() != 0)[..., None, None]  # nobody reads the results of padding
    d_out = jnp.where(used, draw(jax.random.key(1), (*rows, *heads, V_DIM)), 0).astype(dtype)
    padded = jnp.pad(v, ((0, 0),) * 3 + ((0, QK_DIM - V_DIM),))
    return {
        "tsmla": lambda: Function(ours(segment_attention, shape, implementation), (q, k, v), d_out),
        "tsmla_kv": lambda: Function(ours(segment_attention_kv, shape, implementation), (q, kv, k_rope), d_out),
        "cudnn": lambda: Function(cudnn(shape), (q, k, padded), d_out),
    }


def errors(shape: Shape, name: str, implementation: str = "cute") -> list[float]:
    """Relative errors of a function's out and of its gradients of q, k and v."""
    used = shape.ids() != 0

    def flat(results: Any) -> list[np.ndarray]:
        return [np.asarray(x.astype(jnp.float32), np.float64)[used] for x in jax.tree.leaves(results)]

    expected = flat(functions(shape, "reference", jnp.float32)["tsmla"]().both())
    got = flat(functions(shape, implementation)[name]().both())
    if name == "tsmla_kv":  # its gradient of k_rope is a sum over heads
        got = [*got[:2], got[2][..., :NOPE_DIM], got[2][..., NOPE_DIM:]]
        expected[2] = expected[2][..., :NOPE_DIM]
    got[3] = got[3][..., :V_DIM]
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, expected, strict=True)]


errors_here = functools.cache(functools.partial(errors, Shape.of(CHECKED)))


class SegmentAttention(Case):
    read = staticmethod(Shape.of)
    points = ("4x4096h16s1", "4x4096h16s8", "4x4096h128s8", "1x16384h16s4", "16x2048h16s1")
    common: ClassVar = {"dtype": "bf16", "errors_at": CHECKED}
    patience = 240
    peers: ClassVar = {"cudnn": "cudnn_jax"}

    def ours(self) -> dict[str, Run]:
        made = functions(Shape.of(self.point))
        return {name: made[name]() for name in ("tsmla", "tsmla_kv")}

    def of_peer(self, name: str) -> Run:
        return functions(Shape.of(self.point))[name]()  # type: ignore[no-any-return]

    def time(self, functions: dict[str, Any]) -> dict[str, float]:
        """Microseconds a call with the gradient: the least of TURNS means of CALLS calls in a row, of which the host
        waits only for the last. `forward_us` gets the same of calls without the gradient."""

        def of(run: Run) -> float:
            return least_seconds(lambda: jax.block_until_ready([run() for _ in range(CALLS)][-1]), TURNS) / CALLS * 1e6

        self.forward_us = {name: of(function.forward) for name, function in functions.items()}
        return {name: of(function) for name, function in functions.items()}

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        return {"point": self.point, "forward_us": round(self.forward_us[name], 2), "rel_err": errors_here(name)}
