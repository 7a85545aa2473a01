"""A CTA's share of a row as vectors of 16 bytes."""

from __future__ import annotations

import struct
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from tsmla_kernels.sm90.warp import quotient
from tsmla_kernels.topk.config import TopkConfig
from tsmla_kernels.topk.keys import NAN
from tsmla_kernels.topk.memory import Place, global_column

SIGMAS = 5.0
"""Standard deviations by which the sample's target count exceeds k times the sampled fraction: see sample_target."""


class Span(NamedTuple):
    """A CTA's share of a row, as vectors of 16 bytes. A chunk is one vector for each thread.

    Attributes:
      address: the address of the row's first vector. lead: columns of that vector before the row's first. behind: the
        element at which the row's columns end, counted from `address`.
      begin: the CTA's first vector. full: how many of the row's vectors lie wholly in the array.
      chunks: how many chunks each CTA has. held: how many of these it holds. stride: the distance in chunks from one
        held chunk to the next.
    """

    address: Int64
    lead: Int32
    behind: Int32
    begin: Int32
    full: Int32
    chunks: Int32
    held: Int32
    stride: Int32


@cute.jit
def span_of(config: TopkConfig, logits: cute.Tensor, first: Int64, columns: Int32, place: Place):
    """The Span of a row: `columns` columns from element `first` of the array on."""
    lead = Int32(first & 3)
    begin = first - Int64(lead)
    elements = Int64(logits.shape[0]) * Int64(logits.shape[1])
    full = (lead + columns + 3) >> 2
    whole = (elements - begin) >> 2
    chunks = quotient(full + (config.cluster * config.threads - 1), config.cluster * config.threads)
    if Int64(full) > whole:
        full = Int32(whole)
    held, stride = chunks, Int32(1)
    if chunks > config.held:
        held, stride = Int32(config.held), chunks // config.held
    return Span(
        address=logits.iterator.toint() + begin * 4,
        lead=lead,
        behind=lead + columns,
        begin=place.rank * chunks * config.threads,
        full=full,
        chunks=chunks,
        held=held,
        stride=stride,
    )


@cute.jit
def mend_vector(span: Span, vector: Int32, values: cute.Tensor):
    """Replace elements outside the row by NaN, and load the row's columns behind the array's last whole vector. Returns
    whether the vector has elements outside the row."""
    changed = Boolean(False)
    if vector * 4 < span.lead or vector * 4 + 4 > span.behind:
        changed = Boolean(True)
        for i in cutlass.range_constexpr(4):
            element = vector * 4 + i
            if element < span.lead or element >= span.behind:
                values[i] = Float32(NAN)
            elif vector >= span.full:
                values[i] = global_column(span.address, element)
    return changed


def sample_target(k: int, span: Span) -> Int32:
    """How many columns of the sample must reach the guessed bound: k times the sampled fraction of the row, plus SIGMAS
    standard deviations and 4."""
    # Approximate instructions: an exactly rounded division or root would be a function call.
    return cute.arch.inline_ptx(
        "{ .reg .f32 s, t; cvt.rn.f32.s32 s, {$r0}; cvt.rn.f32.s32 t, {$r1}; rcp.approx.ftz.f32 t, t;"
        f" mul.f32 s, s, t; mul.f32 s, s, {float_bits(k)}; sqrt.approx.ftz.f32 t, s;"
        f" fma.rn.f32 s, t, {float_bits(SIGMAS)}, s; add.f32 s, s, {float_bits(4)}; cvt.rzi.s32.f32 {{$w0}}, s; }}",
        write_only_types=[Int32],
        read_only_args=[span.held, span.chunks],
    )


def float_bits(value: float) -> str:
    """The PTX literal of a float32."""
    return "0f" + struct.pack(">f", value).hex().upper()
