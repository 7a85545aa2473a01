"""Bundles that the device functions of compress_write_kv_cache pass to each other."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64


class CompressArrays(NamedTuple):
    """The operands after cache, state and state_positions. These three are the same memory as new_cache, new_state and
    new_positions, through which the kernel reads them.

    Attributes:
      kv_score: [T, 2 W]. ape: [ratio, W]. state_slots, seq_lens: [B]. cu_seqlens_q: [B + 1].
      norm_weight: [C]. cos_sin: [N, R]. block_tables: [B, M]. kv_scale: [1].
      new_cache: [P, page bytes] or [P, Z, row]. new_state: [N, ring, 2 W]. new_positions: [N, ring].
    """

    kv_score: cute.Tensor
    ape: cute.Tensor
    state_slots: cute.Tensor
    seq_lens: cute.Tensor
    cu_seqlens_q: cute.Tensor
    norm_weight: cute.Tensor
    cos_sin: cute.Tensor
    block_tables: cute.Tensor
    kv_scale: cute.Tensor
    new_cache: cute.Tensor
    new_state: cute.Tensor
    new_positions: cute.Tensor


class Request(NamedTuple):
    """A request: its index, its first new token, that token's position, its length with the new tokens, and the
    index of its state."""

    index: Int32
    token: Int32
    start: Int32
    length: Int32
    state: Int32


class Source(NamedTuple):
    """The addresses from which a thread reads the rows of a request's windows.

    Attributes:
      new, old, bias: addresses of the thread's first channel in the first row of kv_score, of the state's ring, and of
        ape.
      start: position of the request's first new token. token: the row of a new token in kv_score, less its position.
      ring: rows of the ring.
    """

    new: Int64
    old: Int64
    bias: Int64
    start: Int32
    token: Int32
    ring: Int32


class Sums(NamedTuple):
    """Sums of each channel over some rows of a window: the greatest score, the sum of the weights, and the weighted sum
    of kv. Each is a tensor in shared memory [slots, C], with a slot for each part or CTA, or in registers."""

    greatest: cute.Tensor
    total: cute.Tensor
    pooled: cute.Tensor


class Target(NamedTuple):
    """The place to which an entry is written, loaded before the entry is pooled: its page (-1 for no page), its row
    there, and the cos and sin of a thread's channels."""

    page: Int32
    offset: Int32
    cos: cute.Tensor
    sin: cute.Tensor


class Quantised(NamedTuple):
    """A thread's values, and the exponent of their power-of-two scale."""

    values: cute.Tensor
    exponent: Int32


class Place(NamedTuple):
    """A thread's place: its CTA in the cluster, its part of the CTA's rows, its lane in a row, and its first
    channel."""

    rank: Int32
    part: Int32
    lane: Int32
    channel: Int32
