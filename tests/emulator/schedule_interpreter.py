"""The schedule of latent attention, run lane by lane in Python: what CuTe DSL would trace is executed with numbers.

Stand-ins take the place of cutlass while the schedule's modules are imported. The 32 lanes of a warp are greenlets: one
runs until it meets the others, then the next.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from greenlet import getcurrent, greenlet

import tsmla_kernels
from tsmla_kernels.sm90.latent.shape import LatentShape, workspace_shapes

FOLDER = Path(tsmla_kernels.__file__).parent / "sm90"
LANES = 32
GARBAGE = 123456789
PIECES_KEPT = 8  # places for descriptions


def stand_in(name: str, **attributes: Any) -> Any:
    """A module of that name and those attributes."""
    module = types.ModuleType(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


class Warp:
    """What the lanes of a warp exchange."""

    def __init__(self) -> None:
        self.lanes: list[greenlet] = []
        self.lane = 0
        self.meetings = [0] * LANES
        self.exchanged: list[list[Any]] = [[None] * LANES, [None] * LANES]
        self.until_all_are_there: Callable[[], None] = lambda: None

    def run(self, work: Callable[[], None]) -> None:
        """Run all lanes, from one meeting to the next, until all have ended."""
        self.lanes, self.meetings = [greenlet(work) for _ in range(LANES)], [0] * LANES
        self.until_all_are_there = getcurrent().switch
        ended = 0
        while ended != LANES:
            for lane, each in enumerate(self.lanes):
                self.lane = lane
                each.switch()
            ended = [each.dead for each in self.lanes].count(True)
            if ended not in (0, LANES) or self.meetings.count(self.meetings[0]) != LANES:
                raise RuntimeError(f"{LANES - ended} lanes wait for lanes that have ended")

    def exchange(self, value: Any = None) -> list[Any]:
        """Every lane's value, when all have given theirs."""
        lane = self.lane
        met = self.meetings[lane]
        given = self.exchanged[met % 2]
        self.meetings[lane] = met + 1
        given[lane] = value
        self.until_all_are_there()
        return given

    def reduce(self, value: int, how: str) -> int:
        values = self.exchange(value)
        return {"add": sum, "max": max, "min": min}[how](values)

    def shuffle(self, value: int, source: int) -> int:
        return self.exchange(value)[source]

    def shuffle_up(self, value: int, *, offset: int, mask_and_clamp: int) -> int:
        values, lane = self.exchange(value), self.lane
        return values[lane - offset] if lane >= offset else value

    def ballot(self, value: bool) -> int:
        return sum(bool(v) << lane for lane, v in enumerate(self.exchange(value)))


class Array:
    """A tensor of integers. Indices beyond it are errors."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape = array, array.shape
        self.view = memoryview(array)  # its elements are Python's integers, in a third of numpy's time

    @property
    def iterator(self) -> Pointer:
        return Pointer(self.array.reshape(-1))

    def _check(self, index: Any) -> None:
        """An element of each dimension: beyond the end is an error of the view's own, before the start is none."""
        assert min(index) >= 0 if isinstance(index, tuple) else index >= 0, f"{index} of {self.shape}"

    def __getitem__(self, index: Any) -> int:
        self._check(index)
        return self.view[index]

    def __setitem__(self, index: Any, value: int) -> None:
        self._check(index)
        self.view[index] = value


@dataclass
class Pointer:
    """An address within an array."""

    array: np.ndarray

    def __add__(self, elements: int) -> Pointer:
        return Pointer(self.array[elements:])


@dataclass(frozen=True)
class Piece:
    """Key blocks [begin, end) of a row tile that begins at row `row` of the request, as cluster `cluster` has it;
    fewest_keys: the word FEWEST_KEYS, which means that with visible_lens alone."""

    cluster: int
    request: int
    row: int
    begin: int
    end: int
    slot: int
    fewest_keys: int = 0


class Interpreter:
    """PieceWalk, or DealtWalk of the sparse kernel, to be run for the clusters of a batch."""

    def __init__(self) -> None:
        self.warp = Warp()
        self.memory, self.share, self.walk, self.deal = self._import()
        self.flags = (self.memory.Busy.FIRST, self.memory.Busy.LAST)

    def run(
        self,
        shape: LatentShape,
        num_clusters: int,
        seq_lens: np.ndarray,
        width: int,
        cu_seqlens_q: np.ndarray | None = None,
        equal_lengths: bool = False,
        visible_lens: np.ndarray | None = None,
        dealt: bool = False,
    ) -> tuple[list[Piece], np.ndarray]:
        """(the pieces of all clusters, split_info) of a batch, with a table of `width` pages."""
        shapes = workspace_shapes(shape, num_clusters * shape.cluster, len(seq_lens), width)
        if dealt:
            words = self.deal.DEALT_STATE_WORDS
            walk = self.deal.DealtWalk(shape, pieces_kept=PIECES_KEPT, equal_lengths=equal_lengths)
        else:
            words, batch = self.share.STATE_WORDS, self.share.BatchShare(shape, equal_lengths=equal_lengths)
            walk = self.walk.PieceWalk(shape, batch=batch, pieces_kept=PIECES_KEPT)
        rows = len(seq_lens) * shape.max_q_len if cu_seqlens_q is None else int(cu_seqlens_q[-1])
        split_info = Array(np.full(shapes["split_info"][0], GARBAGE, np.int32))
        lens, table = Array(seq_lens.astype(np.int32)), types.SimpleNamespace(shape=(len(seq_lens), width))
        word = self.memory.Piece
        offsets = lens if cu_seqlens_q is None else Array(cu_seqlens_q.astype(np.int32))
        pieces = []
        for cluster in range(num_clusters):
            described = Array(np.full((len(word), PIECES_KEPT), GARBAGE, np.int32))
            state = self.memory.Schedule(
                block_tables=table,
                seq_lens=lens,
                cu_seqlens_q=offsets,
                partial_lse=types.SimpleNamespace(shape=shapes["partial_lse"][0]),
                split_info=split_info,
                pieces=described,
                state=Array(np.full(words, GARBAGE, np.int32)),
                num_clusters=num_clusters,
                cluster_index=cluster,
                rank=0,
                all_rows=rows * shape.num_heads,
                order=Array(np.full(self.share.MAX_SORTED, GARBAGE, np.int32)),
                visible_lens=None if visible_lens is None else Array(visible_lens),
            )

            def work(state: Any = state, described: Array = described, cluster: int = cluster) -> None:
                lane = self.warp.lane
                walk.begin(state, walk.batch.numbers(min(lane, len(seq_lens) - 1), lens, offsets))
                number = 0
                while True:
                    walk.next_piece(number, state)
                    place = number % PIECES_KEPT
                    begin, end = described[word.BLOCK_BEGIN, place], described[word.BLOCK_END, place]
                    if begin == end:
                        break
                    if lane == 0:
                        request, row = described[word.REQUEST, place], described[word.ROW_IN_REQUEST, place]
                        slot, fewest = described[word.SLOT, place], described[word.FEWEST_KEYS, place]
                        pieces.append(Piece(cluster, request, row, begin, end, slot, fewest))
                    number += 1
                    self.warp.exchange()

            self.warp.run(work)
        return pieces, split_info.array

    def _import(self) -> tuple[types.ModuleType, ...]:
        """memory, share and walk of latent attention, and deal of the sparse kernel."""
        warp = self.warp
        arch = types.SimpleNamespace(
            lane_idx=lambda: warp.lane,
            sync_warp=lambda: warp.exchange(),
            warp_redux_sync=warp.reduce,
            shuffle_sync=warp.shuffle,
            shuffle_sync_up=warp.shuffle_up,
            vote_ballot_sync=warp.ballot,
            popc=lambda value: value.bit_count(),
            rcp_approx=lambda value: np.float32(1) / value,
            fence_proxy=lambda *_, **__: None,
        )
        cute = stand_in(
            "cutlass.cute",
            jit=lambda function: function,
            arch=arch,
            Tensor=object,
            Pointer=object,
            make_layout=lambda shape: shape,
            recast_ptr=lambda pointer, dtype: Pointer(pointer.array.view(dtype)),
            make_tensor=lambda pointer, shape: Array(pointer.array[: shape[0] if isinstance(shape, tuple) else shape]),
            make_rmem_tensor=lambda shape, dtype: Array(np.full(shape, GARBAGE, np.int64)),
        )
        names = ("BFloat16", "Float16", "Float8E4M3FN", "Numeric", "Constexpr")
        cutlass = stand_in(
            "cutlass",
            **dict.fromkeys(names, object),
            Int8=np.int8,
            Int32=int,
            Int64=int,
            Float32=np.float32,
            Boolean=bool,
            const_expr=lambda value: value,
            range_constexpr=range,
            range=lambda *bounds, unroll: range(*bounds),
            min=min,
            max=max,
            cute=cute,
        )
        stand_ins = {"cutlass": cutlass, "cutlass.cute": cute}
        modules = []
        with mock.patch.dict(sys.modules, stand_ins):
            for name in ("warp", "latent.memory", "latent.share", "latent.walk", "sparse.deal"):
                full = f"tsmla_kernels.sm90.{name}"
                spec = importlib.util.spec_from_file_location(full, FOLDER / f"{name.replace('.', '/')}.py")
                assert spec is not None and spec.loader is not None
                module = sys.modules[full] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                modules.append(module)
        return tuple(modules[1:])
