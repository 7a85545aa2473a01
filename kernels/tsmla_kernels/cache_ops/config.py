"""Which cache kernel serves a call: static configurations, and how threads share a row. Imports no cutlass.

Everything here is a pure function of dtypes and widths, so that one compiled object serves every number of tokens,
heads, pages, requests, every page size and every scale.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tsmla_kernels.kernel import ITEMSIZE

if TYPE_CHECKING:
    from tsmla_kernels.contract import CacheGatherSpec, CacheWriteSpec
    from tsmla_kernels.contract.cache import RopeWriteSpec

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_107a", "sm_120a")
INPUTS = ("bfloat16", "float16", "float32")
CACHES = ("bfloat16", "float16", "float8_e4m3fn")
STORE_BYTES = 16  # the widest store of a thread
THREADS = 288  # most threads of a CTA, unless one row needs more: enough for 4 rows of 576 16-bit values, or 8 of fp8
MAX_THREADS = 1024


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the threads of a CTA share rows of results.

    Attributes:
      vector: values that a thread stores at once: one chunk of a row.
      chunks: chunks of a row, each with its own thread.
      rows: rows that a CTA handles side by side.
    """

    vector: int
    chunks: int
    rows: int

    @property
    def threads(self) -> int:
        return self.chunks * self.rows


def tiling(columns: int, *dtypes: str) -> Tiling:
    """The tiling of rows of `columns` values, for a launch that stores rows in each of `dtypes`."""
    vector = STORE_BYTES // max(ITEMSIZE[dtype] for dtype in dtypes)
    chunks = columns // vector
    return Tiling(vector, chunks, max(1, THREADS // max(1, chunks)))  # the reasons refuse rows narrower than a chunk


@dataclasses.dataclass(frozen=True)
class WriteConfig:
    """The static facts that an object of write_kv_cache is compiled for.

    Attributes:
      in_dtype: the dtype of latent and k_rope. kv_dtype: the dtype of the cache.
      latent_dim: L. rope_dim: R.
      unroll: rows that a thread has in flight at once.
      slot_dtype: the dtype of slot_mapping, "int32" or "int64".
    """

    in_dtype: str
    kv_dtype: str
    latent_dim: int = 512
    rope_dim: int = 64
    unroll: int = 2
    slot_dtype: str = "int32"

    @property
    def head_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def tiling(self) -> Tiling:
        return tiling(self.head_dim, self.kv_dtype)


@dataclasses.dataclass(frozen=True)
class RopeWriteConfig:
    """The static facts that an object of rope_write_kv_cache is compiled for.

    Attributes:
      in_dtype: the dtype of q_nope, q_rope, latent and k_rope. q_dtype: the dtype of the query that is written.
        kv_dtype: the dtype of the cache.
      latent_dim: L. rope_dim: R.
      rope_interleave: whether the members of a rotated pair are neighbours in q_rope and k_rope, instead of being in
        different halves.
      rope_layout: "interleaved" or "halves": the same for the rotated values.
      unroll: rows that a thread has in flight at once.
    """

    in_dtype: str
    q_dtype: str
    kv_dtype: str
    latent_dim: int = 512
    rope_dim: int = 64
    rope_interleave: bool = True
    rope_layout: str = "interleaved"
    unroll: int = 1

    @property
    def head_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def tiling(self) -> Tiling:
        return tiling(self.head_dim, self.q_dtype, self.kv_dtype)


@dataclasses.dataclass(frozen=True)
class GatherConfig:
    """The static facts that an object of gather_kv_cache is compiled for.

    Attributes:
      kv_dtype: the dtype of the cache. out_dtype: the dtype of the gathered rows.
      head_dim: D.
      rounds: how many rows each thread of a CTA copies, one after the other or `unroll` at once.
      unroll: rows that a thread has in flight at once; it divides rounds.
    """

    kv_dtype: str
    out_dtype: str
    head_dim: int = 576
    rounds: int = 4
    unroll: int = 4

    @property
    def tiling(self) -> Tiling:
        return tiling(self.head_dim, self.out_dtype)

    @property
    def cta_rows(self) -> int:
        """How many rows a CTA gathers."""
        return self.tiling.rows * self.rounds


def write_reasons(spec: CacheWriteSpec) -> list[str]:
    """Why the kernel of write_kv_cache cannot run this call; empty if it can."""
    reasons = _dtype_reasons("latent", spec.in_dtype, INPUTS) + _dtype_reasons("kv_cache", spec.kv_dtype, CACHES)
    return reasons or _width_reasons(
        {"latent_dim (L)": spec.latent_dim, "rope_dim (R)": spec.rope_dim},
        tiling(spec.head_dim, spec.kv_dtype),
        f"a {spec.kv_dtype} cache",
    )


def write_config(spec: CacheWriteSpec) -> WriteConfig:
    """The configuration that serves `spec`."""
    return WriteConfig(spec.in_dtype, spec.kv_dtype, spec.latent_dim, spec.rope_dim, slot_dtype=spec.slot_dtype)


def rope_write_reasons(spec: RopeWriteSpec) -> list[str]:
    """Why the kernel of rope_write_kv_cache cannot run this call; empty if it can."""
    write = spec.write
    reasons = _dtype_reasons("latent", write.in_dtype, INPUTS)
    reasons += _dtype_reasons("kv_cache", write.kv_dtype, CACHES) + _dtype_reasons("q_dtype", spec.q_dtype, CACHES)
    return reasons or _width_reasons(
        {"latent_dim (L)": write.latent_dim, "rope_dim (R)": write.rope_dim},
        tiling(write.head_dim, spec.q_dtype, write.kv_dtype),
        f"a {spec.q_dtype} q and a {write.kv_dtype} cache",
    )


def rope_write_config(spec: RopeWriteSpec) -> RopeWriteConfig:
    """The configuration that serves `spec`."""
    write = spec.write
    return RopeWriteConfig(
        in_dtype=write.in_dtype,
        q_dtype=spec.q_dtype,
        kv_dtype=write.kv_dtype,
        latent_dim=write.latent_dim,
        rope_dim=write.rope_dim,
        rope_interleave=spec.rope_interleave,
        rope_layout=spec.rope_layout,
    )


def gather_reasons(spec: CacheGatherSpec) -> list[str]:
    """Why the kernel of gather_kv_cache cannot run this call; empty if it can."""
    reasons = _dtype_reasons("kv_cache", spec.kv_dtype, CACHES) + _dtype_reasons("out_dtype", spec.out_dtype, INPUTS)
    return reasons or _width_reasons(
        {"latent_dim + rope_dim (D)": spec.head_dim}, tiling(spec.head_dim, spec.out_dtype), f"{spec.out_dtype} rows"
    )


def gather_config(spec: CacheGatherSpec) -> GatherConfig:
    """The configuration that serves `spec`."""
    return GatherConfig(spec.kv_dtype, spec.out_dtype, spec.head_dim)


def _dtype_reasons(name: str, dtype: str, legal: tuple[str, ...]) -> list[str]:
    if dtype in legal:
        return []
    argument = name if name in ("q_dtype", "out_dtype") else f"{name}.dtype"
    return [f"{argument} is {dtype}; the cache kernels take {', '.join(legal)}"]


def _width_reasons(widths: dict[str, int], tiles: Tiling, stored: str) -> list[str]:
    takes = f"with {stored} the cache kernels take"
    reasons = [
        f"{name} is {width}; {takes} multiples of {tiles.vector}"
        for name, width in widths.items()
        if width % tiles.vector
    ]
    if not reasons and tiles.threads > MAX_THREADS:
        reasons.append(f"{' + '.join(widths)} is {sum(widths.values())}; {takes} at most {MAX_THREADS * tiles.vector}")
    return reasons
