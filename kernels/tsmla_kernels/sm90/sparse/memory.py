"""Records of the sparse kernel: the bundles that its device functions pass on."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from tsmla_kernels.sm90.sparse.config import GATHER_WARPS

PIECES_KEPT = 16  # places in the ring of descriptions: those ahead, and those that the slowest warp has not left
GATHER_WARP = 12  # the first gathering warp, which also finds the first piece
GATHER_ROWS = 64 // GATHER_WARPS  # rows of a block that a gathering warp copies
FIRST_PIECES_THREADS = 32 + 32 * GATHER_WARPS  # the scheduling warp and the gathering warps


class Arrays(NamedTuple):
    """The launcher's operands after q and the caches.

    Attributes:
      indices: [T, K] i32. lengths: [T] i32; without lengths any tensor of that shape, whose values are not read.
      sinks: [H] f32, or None. scales: [3] f32.
      out: [N, L]. lse: [N] f32, natural log.
      partial_out, partial_lse, split_info: the workspaces of config.workspace_shapes.
    """

    indices: cute.Tensor
    lengths: cute.Tensor
    sinks: cute.Tensor | None
    scales: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    partial_out: cute.Tensor
    partial_lse: cute.Tensor
    split_info: cute.Tensor


class Query(NamedTuple):
    """Q's way into shared memory: the TMA atom and tensor, q itself, Q's place, and the barrier that waits for it."""

    atom: cute.CopyAtom
    tma: cute.Tensor
    q: cute.Tensor
    place: cute.Pointer
    full: cute.Pointer


class Scratch(NamedTuple):
    """What the softmax warpgroup has besides the ring: Q, scratch for reducing over keys, and which keys are valid."""

    query: Query
    exchange: cute.Pointer
    valid: cute.Tensor


class Gather(NamedTuple):
    """What the gathering warps read and write.

    Attributes:
      q: the operand. caches: one or two. indices: the operand.
      ring: the address of the ring's first stage. full, empty: its barriers.
      valid: [GATHER_WARPS, stages], a bit for each of a gathering warp's rows of a stage: whether its slot exists.
      pieces: the ring of descriptions.
    """

    q: cute.Tensor
    caches: tuple[cute.Tensor, ...]
    indices: cute.Tensor
    ring: Int32
    full: cute.Pointer
    empty: cute.Pointer
    valid: cute.Tensor
    pieces: cute.Tensor
