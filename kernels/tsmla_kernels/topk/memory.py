"""Records of select_topk: shared memory, its words, and the bundles that device functions pass on."""

# Annotations are not postponed, because cute.struct reads the sizes of Storage from them.
import enum
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from tsmla_kernels.sm90.storage import checked_storage
from tsmla_kernels.topk.config import BINS, TopkConfig

GROUPS = 32
"""How many groups of neighbouring bins there are. The groups' sums are searched first, then the bins of one group."""
GROUP_BINS = BINS // GROUPS


class Result(enum.IntEnum):
    """Words of shared memory that one thread of a CTA writes for all of the CTA's threads.

    BIN: the bin that BinSearch.find has found. NEEDED: how many keys of that bin are needed. INSIDE: how many keys it
    holds. KEY: the k-th greatest key. LIMIT: the last position at which a key equal to KEY is selected.
    """

    BIN = 0
    NEEDED = 1
    INSIDE = 2
    KEY = 3
    LIMIT = 4


class Total(enum.IntEnum):
    """Words of a CTA's shared memory about its own columns. The cluster's other CTAs read all of them but BASE.

    ABOVE: how many columns are above the deciding bin. INSIDE: how many are in it. LEAST, GREATEST: bounds of the keys
    in it. BASE: how many selected columns the CTAs before this one have.
    """

    ABOVE = 0
    INSIDE = 1
    LEAST = 2
    GREATEST = 3
    BASE = 4


class Histogram(NamedTuple):
    """Counts of the bins, and the counts' sum over each of the GROUPS groups of bins."""

    bins: cute.Tensor
    groups: cute.Tensor


class Shared(NamedTuple):
    """A CTA's shared memory as tensors.

    Attributes:
      columns: the held columns of the row, all or a sample. Reused for the columns that are kept, and for the copies
        of ExactSearch.
      marks: a byte for each vector of the CTA's share: four bits for columns above the bin or selected, and four for
        columns that are equal.
      kept_counts: for each thread, how many columns it keeps.
      sample: counts of the held columns. kept: counts of the kept columns; its bins are those of `sample` if
        config.histograms is 1.
      results: words of Result. totals: words of Total.
      warp_above, warp_inside: for each warp, how many of its columns are above the deciding bin and in it.
      candidates: entries of the CTA's columns in the deciding bin. candidate_warps: for each entry, the warp that
        found it.
      cluster_candidates: the candidates of all CTAs of the cluster. candidate_ranks: for each of these, how many
        others are greater; or, for each warp, the position that ExactSearch.locate found.
      entries: the selected columns as entries, to be sorted.
    """

    columns: cute.Tensor
    marks: cute.Tensor
    kept_counts: cute.Tensor
    sample: Histogram
    kept: Histogram
    results: cute.Tensor
    totals: cute.Tensor
    warp_above: cute.Tensor
    warp_inside: cute.Tensor
    candidates: cute.Tensor
    candidate_warps: cute.Tensor
    cluster_candidates: cute.Tensor
    candidate_ranks: cute.Tensor
    entries: cute.Tensor


class Place(NamedTuple):
    """A thread's place: its row, its CTA in the cluster, its warp and lane, and its index in the CTA."""

    row: Int32
    rank: Int32
    warp: Int32
    lane: Int32
    thread: Int32


class Arrays(NamedTuple):
    """The arrays of a launch. A field is None if the config has no use for it. indices: the words of the selection, if
    config.bits."""

    logits: cute.Tensor
    seq_lens: cute.Tensor
    row_starts: cute.Tensor | None
    block_tables: cute.Tensor | None
    row_requests: cute.Tensor | None
    indices: cute.Tensor
    counts: cute.Tensor | None
    scores: cute.Tensor | None


class Output(NamedTuple):
    """The arrays of a row's results, and the sources of slots and scores.

    Attributes:
      indices, block_tables, scores: arrays of the launch, as in Arrays.
      table: which row of the block table is used.
      address: the address of the row's first logit.
    """

    indices: cute.Tensor
    block_tables: cute.Tensor | None
    scores: cute.Tensor | None
    table: Int32
    address: Int64


def storage_of(config: TopkConfig) -> Any:
    """The struct of a CTA's shared memory: the parts of Shared, and the barriers of ExactSearch's copies.

    Raises:
      ValueError: the struct is larger than a CTA's shared memory.
    """

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[Int64, config.warps * config.stages]
        columns: cute.struct.Align[cute.struct.MemRange[Float32, config.held_words], 128]
        bins: cute.struct.Align[cute.struct.MemRange[Int32, config.histograms * BINS], 16]
        marks: cute.struct.Align[cute.struct.MemRange[Int32, config.mark_words], 16]
        candidates: cute.struct.Align[cute.struct.MemRange[Uint64, config.listed], 16]
        cluster_candidates: cute.struct.Align[cute.struct.MemRange[Uint64, config.listed], 16]
        entries: cute.struct.Align[cute.struct.MemRange[Uint64, config.sorted_entries], 16]
        candidate_warps: cute.struct.MemRange[Int32, config.listed]
        candidate_ranks: cute.struct.MemRange[Int32, config.listed]
        kept_counts: cute.struct.MemRange[Int32, config.threads]
        groups: cute.struct.MemRange[Int32, 2 * GROUPS]
        warp_above: cute.struct.MemRange[Int32, config.warps]
        warp_inside: cute.struct.MemRange[Int32, config.warps]
        results: cute.struct.MemRange[Int32, len(Result)]
        totals: cute.struct.MemRange[Int32, len(Total)]

    return checked_storage(Storage, config)


def shared_tensors(storage: cute.struct, config: TopkConfig) -> Shared:
    """Views of the allocated `storage`."""
    candidates = cute.make_layout(config.listed)
    warps = cute.make_layout(config.warps)
    bins, groups = cute.make_layout(BINS), cute.make_layout(GROUPS)
    second = (config.histograms - 1) * BINS
    return Shared(
        columns=storage.columns.get_tensor(cute.make_layout(config.held_words)),
        marks=storage.marks.get_tensor(cute.make_layout(config.mark_words)),
        kept_counts=storage.kept_counts.get_tensor(cute.make_layout(config.threads)),
        sample=Histogram(storage.bins.get_tensor(bins), storage.groups.get_tensor(groups)),
        kept=Histogram(
            cute.make_tensor(storage.bins.data_ptr() + second, bins),
            cute.make_tensor(storage.groups.data_ptr() + GROUPS, groups),
        ),
        results=storage.results.get_tensor(cute.make_layout(len(Result))),
        totals=storage.totals.get_tensor(cute.make_layout(len(Total))),
        warp_above=storage.warp_above.get_tensor(warps),
        warp_inside=storage.warp_inside.get_tensor(warps),
        candidates=storage.candidates.get_tensor(candidates),
        candidate_warps=storage.candidate_warps.get_tensor(candidates),
        cluster_candidates=storage.cluster_candidates.get_tensor(candidates),
        candidate_ranks=storage.candidate_ranks.get_tensor(candidates),
        entries=storage.entries.get_tensor(cute.make_layout(config.sorted_entries)),
    )


def add_one(address: Int32) -> None:
    """Add 1 to a word of shared memory."""
    cute.arch.inline_ptx("red.relaxed.cta.shared::cta.add.u32 [{$r0}], 1;", read_only_args=[address])


def add_to(words: cute.Tensor, index: Int32, value: Int32) -> None:
    """Add to a word of the CTA's shared memory."""
    cute.arch.red(words.iterator + index, value, op="add", dtype="s32", sem="relaxed", scope="cta")


def bound(words: cute.Tensor, index: Int32, kind: str, value: Uint32) -> None:
    """Lower ("umin") or raise ("umax") a word of the CTA's shared memory to a value."""
    cute.arch.red(words.iterator + index, value, op=kind, dtype="u32", sem="relaxed", scope="cta")


def global_column(address: Int64, element: Int32) -> Float32:
    """Element `element` of the float32 numbers at `address` in global memory."""
    source = cute.make_ptr(Float32, address + Int64(element) * 4, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(source, cute.make_layout(1))[0]


def global_vector(address: Int64, vector: Int32, full: Int32):
    """The four float32 numbers of vector `vector` of the vectors at `address`; NaN if `vector` is at least `full`."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .f32 a, b, c, d; setp.lt.s32 p, {$r1}, {$r2};"
        " mov.f32 a, 0f7FC00000; mov.f32 b, a; mov.f32 c, a; mov.f32 d, a;"
        " @p ld.global.nc.L1::no_allocate.v4.f32 {a, b, c, d}, [{$r0}];"
        " mov.f32 {$w0}, a; mov.f32 {$w1}, b; mov.f32 {$w2}, c; mov.f32 {$w3}, d; }",
        write_only_types=[Float32] * 4,
        read_only_args=[address + Int64(vector) * 16, vector, full],
    )
