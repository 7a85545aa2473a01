"""Time attention over packed rows, forward and with its gradient, beside cuDNN's on one GPU: what a trainer calls.

    python3 benchmarks/segment_attention.py --out FILE.json [--points 4x4096h16s8/...] [--seconds 500]

A point is rows x tokens, heads, and segments a row; the lengths of segments are random and the same in every run, and
the last of a row is cut short by padding. Head dims are 192 and 128, masks causal, inputs random normal bf16.

"tsmla" is `nn.segment_attention`, "tsmla_kv" `nn.segment_attention_kv` (which also saves making k: not in its favour
here), "cudnn" jax's private operation with the same segments as its packed layout, for which cuDNN needs 9.10 or newer.
It finds the segments of v by the head dim of q, so its v is padded to 192 beforehand, and its result is cut. Ids become
offsets, or cuDNN's lengths, outside of what is timed for cuDNN and inside for ours. Times are the shortest of several
turns of ten jitted calls by the host's clock. Errors are relative (Frobenius), of tokens that are no padding, against
the reference in float32 at the first point's heads and 512 tokens. A peer that can't run is left out and said.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from harness import POINTS, Record, least_seconds, within_budget

from tsmla_jax.nn import Segments, segment_attention, segment_attention_kv

WITHOUT = flags.DEFINE_list("without", [], "peers that are left out: one that fails on the GPU ends the others, too")
TURNS = flags.DEFINE_integer("turns", 10, "turns of each peer at a point")
CALLS = 10
QK_DIM, V_DIM, ROPE_DIM = 192, 128, 64
NOPE_DIM = QK_DIM - ROPE_DIM
SCALE = QK_DIM**-0.5
DEFAULT = "4x4096h16s1/4x4096h16s8/4x4096h128s8/1x16384h16s4/16x2048h16s1"


@dataclass(frozen=True)
class Point:
    """Rows of `length` tokens, heads, and segments a row."""

    rows: int
    length: int
    heads: int
    segments: int

    @classmethod
    def parse(cls, name: str) -> Point:
        """From a name like 4x4096h16s8; ValueError for another."""
        if not (found := re.fullmatch(r"(\d+)x(\d+)h(\d+)s(\d+)", name)):
            raise ValueError(f"got point {name!r}; legal: ROWSxTOKENShHEADSsSEGMENTS, as 4x4096h16s8")
        return cls(*map(int, found.groups()))

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.length}h{self.heads}s{self.segments}"

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


class Packed(NamedTuple):
    """cuDNN's packed layout as jax's operation takes it: lengths [B, M] and starts [B, M + 1], -1 for no segment."""

    lens: np.ndarray
    starts: np.ndarray


def packed_layout(ids: np.ndarray, max_segments: int) -> Packed:
    """The layout of rows of ids, 0 for padding."""
    lens = np.full((len(ids), max_segments), -1, np.int32)
    starts = np.full((len(ids), max_segments + 1), -1, np.int32)
    for row, line in enumerate(ids):
        firsts = np.flatnonzero((line != 0) & (np.diff(line, prepend=0) != 0))
        lens[row, : len(firsts)] = [(line == line[first]).sum() for first in firsts]
        starts[row, : len(firsts)] = firsts
    return Packed(lens, starts)


def operands(point: Point) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, S, H, K], kv [B, S, H, N + V] and k_rope [B, S, R]."""
    heads = (point.heads,)
    widths = ((*heads, QK_DIM), (*heads, NOPE_DIM + V_DIM), (ROPE_DIM,))
    keys = jax.random.split(jax.random.key(0), 3)
    rows = (point.rows, point.length)
    q, kv, k_rope = (jax.random.normal(k, (*rows, *w), jnp.bfloat16) for k, w in zip(keys, widths, strict=True))
    return q, kv, k_rope


@jax.jit
def expand(q: jax.Array, kv: jax.Array, k_rope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k [B, S, H, K] and v [B, S, H, V]."""
    rope = jnp.broadcast_to(k_rope[:, :, None], (*kv.shape[:3], ROPE_DIM))
    return q, jnp.concatenate([kv[..., :NOPE_DIM], rope], axis=-1), kv[..., NOPE_DIM:]


def ours(function: Callable[..., jax.Array], point: Point, implementation: str) -> Callable[..., jax.Array]:
    """A function of the operands, segments made anew in each call."""
    ids = jnp.asarray(point.ids())

    def attend(*arrays: jax.Array) -> jax.Array:
        segments = Segments.from_ids(ids, max_segments=point.segments)
        return function(*arrays, segments, softmax_scale=SCALE, implementation=implementation)

    return attend


def cudnn(point: Point) -> Callable[..., jax.Array]:
    """cuDNN through jax's private operation: the public one refuses these head dims."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    lens, starts = map(jnp.asarray, packed_layout(point.ids(), point.segments))
    segments = {"q_seqlen": lens, "kv_seqlen": lens}
    if point.segments > 1:
        segments |= {"q_offsets": starts, "kv_offsets": starts}
    else:
        segments = {name: x[:, 0] for name, x in segments.items()}
    causal = fused.MaskType.PADDING_CAUSAL

    def attend(*arrays: jax.Array) -> jax.Array:
        out = fused.dot_product_attention(*arrays, **segments, scale=SCALE, mask_type=causal, qkv_layout="BTNH")
        return out[..., :V_DIM]

    return attend


class Peer:
    """A function of arrays, jitted once alone and once with its gradient."""

    def __init__(self, attend: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], d_out: jax.Array) -> None:
        """d_out: the cotangent of the result."""

        def with_gradient(d_out: jax.Array, *arrays: jax.Array) -> Any:
            out, pull = jax.vjp(attend, *arrays)
            return out, pull(d_out)

        self.forward = functools.partial(jax.jit(attend), *arrays)
        self.both = functools.partial(jax.jit(with_gradient), d_out, *arrays)


def peers(point: Point, implementation: str = "cute") -> dict[str, Peer]:
    joint = operands(point)
    apart = expand(*joint)
    padded = (*apart[:2], jnp.pad(apart[2], ((0, 0),) * 3 + ((0, QK_DIM - V_DIM),)))
    d_out = cotangent(point)
    return {
        "tsmla": Peer(ours(segment_attention, point, implementation), apart, d_out),
        "tsmla_kv": Peer(ours(segment_attention_kv, point, implementation), joint, d_out),
        "cudnn": Peer(cudnn(point), padded, d_out),
    }


def cotangent(point: Point) -> jax.Array:
    """Of the result; 0 in padding, whose result is no one's."""
    shape = (point.rows, point.length, point.heads, V_DIM)
    used = jnp.asarray(point.ids() != 0)[..., None, None]
    return jnp.where(used, jax.random.normal(jax.random.key(1), shape, jnp.bfloat16), 0)


def microseconds(function: Callable[[], Any]) -> float:
    """Of one call, among CALLS that wait for each other on the device alone."""

    def run() -> None:
        for _ in range(CALLS):
            result = function()
        jax.block_until_ready(result)

    return least_seconds(run, TURNS.value) / CALLS * 1e6


def errors(point: Point, found: dict[str, Peer]) -> dict[str, list[float]]:
    """Relative errors of out and of the gradients of q, k and v."""
    wide = tuple(x.astype(jnp.float32) for x in expand(*operands(point)))
    exact = Peer(ours(segment_attention, point, "reference"), wide, cotangent(point).astype(jnp.float32))
    expected = _flat(point, exact.both())
    result = {}
    for name, peer in found.items():
        got = _flat(point, peer.both())
        if name == "tsmla_kv":  # whose k_rope's gradient is a sum over heads
            d_kv = got[2]
            got = [*got[:2], d_kv[..., :NOPE_DIM], d_kv[..., NOPE_DIM:]]
            compared = [*expected[:2], expected[2][..., :NOPE_DIM], expected[3]]
        else:
            got[3] = got[3][..., :V_DIM]
            compared = expected
        result[name] = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, compared, strict=False)]
    return result


def _flat(point: Point, results: Any) -> list[np.ndarray]:
    """The results' tokens that are no padding, in float64."""
    used = point.ids() != 0
    return [np.asarray(x.astype(jnp.float32), np.float64)[used] for x in jax.tree.leaves(results)]


def runnable(point: Point) -> dict[str, Peer]:
    """The peers that run here, each tried once with its gradient."""
    found = {}
    for name, peer in peers(point).items():
        if name in WITHOUT.value:
            continue
        try:
            jax.block_until_ready(peer.both())
            found[name] = peer
        except Exception as error:
            print(f"{name} failed at {point.name}: {type(error).__name__}: {str(error)[:160]}", flush=True)
    return found


def main(argv: list[str]) -> None:
    del argv
    points = [Point.parse(name) for name in (POINTS.value or DEFAULT).split("/")]
    checked = Point(2, 512, points[0].heads, 3)
    found_errors = errors(checked, runnable(checked))
    record = Record(dtype="bf16", errors_at=checked.name)
    print(f"{'point':>18} {'peer':>10} {'forward us':>11} {'both us':>9}  errors of out, dq, dk, dv")
    for point in within_budget(points):
        for name, peer in runnable(point).items():
            forward, both = microseconds(peer.forward), microseconds(peer.both)
            said = " ".join(f"{error:.1e}" for error in found_errors.get(name, []))
            print(f"{point.name:>18} {name:>10} {forward:11.1f} {both:9.1f}  {said}", flush=True)
            record.add(point=point.name, peer=name, forward_us=forward, us=both, rel_err=found_errors.get(name))


if __name__ == "__main__":
    app.run(main)
