"""The decode kernels' schedule, run lane by lane in Python: what CuTe DSL would trace is executed with numbers.

Stand-ins take the place of cutlass while the module is imported under another name. The 32 lanes of a warp are Python's
threads, of which one runs at a time: until it meets the others, then the next.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import tsmla_kernels
from tests.emulator.cache_interpreter import stand_in
from tsmla_kernels.sm90.decode.config import DecodeConfig

FOLDER = Path(tsmla_kernels.__file__).parent / "sm90"
LANES = 32
GARBAGE = 123456789
OVERHEAD = 5  # as the decode kernels have it


class Warp:
    """What the lanes of a warp exchange."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.turns: list[threading.Semaphore] = []
        self.exchanged: list[list[Any]] = [[None] * LANES, [None] * LANES]
        self.failures: list[BaseException] = []

    def run(self, work: Callable[[], None]) -> None:
        self.turns = [threading.Semaphore(0) for _ in range(LANES)]
        self.failures = []

        def thread(lane: int) -> None:
            self.here.lane, self.here.meetings = lane, 0
            try:
                self._wait(lane)
                work()
            except BaseException as error:
                self.failures.append(error)
            self.turns[(lane + 1) % LANES].release()

        threads = [threading.Thread(target=thread, args=(lane,)) for lane in range(LANES)]
        for each in threads:
            each.start()
        self.turns[0].release()
        for each in threads:
            each.join()
        if self.failures:
            raise self.failures[0]

    def _wait(self, lane: int) -> None:
        if not self.turns[lane].acquire(timeout=20) or self.failures:
            raise RuntimeError(f"lane {lane} waits for lanes that have ended or gone another way")

    def exchange(self, value: Any = None) -> list[Any]:
        """Every lane's value, when all have given theirs."""
        lane = self.here.lane
        given = self.exchanged[self.here.meetings % 2]
        self.here.meetings += 1
        given[lane] = value
        self.turns[(lane + 1) % LANES].release()
        self._wait(lane)
        return given

    def reduce(self, value: int, how: str) -> int:
        values = self.exchange(value)
        return sum(values) if how == "add" else max(values)

    def shuffle(self, value: int, source: int) -> int:
        return self.exchange(value)[source]

    def shuffle_up(self, value: int, *, offset: int, mask_and_clamp: int) -> int:
        values, lane = self.exchange(value), self.here.lane
        return values[lane - offset] if lane >= offset else value

    def ballot(self, value: bool) -> int:
        return sum(bool(v) << lane for lane, v in enumerate(self.exchange(value)))


class Array:
    """A tensor of integers. Indices beyond it are errors."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape = array, array.shape

    @property
    def iterator(self) -> Pointer:
        return Pointer(self.array.reshape(-1))

    def _index(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        assert all(0 <= i < n for i, n in zip(indices, self.shape, strict=True)), f"{indices} of {self.shape}"
        return indices

    def __getitem__(self, index: Any) -> int:
        return int(self.array[self._index(index)])

    def __setitem__(self, index: Any, value: int) -> None:
        self.array[self._index(index)] = value


@dataclass
class Pointer:
    """An address within an array."""

    array: np.ndarray

    def __add__(self, elements: int) -> Pointer:
        return Pointer(self.array[elements:])


@dataclass(frozen=True)
class Piece:
    """Key blocks [begin, end) of a row tile that begins at row `row` of the request, as cluster `part` has it."""

    part: int
    request: int
    row: int
    begin: int
    end: int
    slot: int


class Interpreter:
    """DecodeSchedule, to be run for the clusters of a batch."""

    def __init__(self) -> None:
        self.warp = Warp()
        self.schedule = self._import()
        self.flags = (self.module.FIRST_BUSY, self.module.LAST_BUSY)  # see decode_schedule

    def run(
        self, config: DecodeConfig, parts: int, seq_lens: np.ndarray, width: int, cu_seqlens_q: np.ndarray | None = None
    ) -> tuple[list[Piece], np.ndarray]:
        """(the pieces of all clusters, split_info) of a batch on `parts` clusters, with a table of `width` pages."""
        schedule = self._configured(config)
        rows = len(seq_lens) * config.max_q_len if cu_seqlens_q is None else int(cu_seqlens_q[-1])
        split_info = Array(np.full((2 * parts, 4), GARBAGE, np.int32))
        lens, table = Array(seq_lens.astype(np.int32)), types.SimpleNamespace(shape=(len(seq_lens), width))
        offsets = lens if cu_seqlens_q is None else Array(cu_seqlens_q.astype(np.int32))
        pieces = []
        for part in range(parts):
            words = self.module.DESCRIPTOR_WORDS
            descriptor = Array(np.full((words, schedule.descriptors), GARBAGE, np.int32))
            walk = Array(np.full(self.module.WALK_WORDS, GARBAGE, np.int32))
            order = Array(np.full(self.module.SORTED, GARBAGE, np.int32))
            state = (
                table, lens, offsets, None, split_info, descriptor, walk, parts, part, 0, rows * config.num_heads, order
            )  # fmt: skip

            def work(state: Any = state, descriptor: Array = descriptor, part: int = part) -> None:
                lane = self.warp.here.lane
                schedule.begin_schedule(state, schedule.numbers(min(lane, len(seq_lens) - 1), lens, offsets))
                piece = 0
                while True:
                    schedule.next_piece(piece, state)
                    at = piece % schedule.descriptors
                    begin, end = descriptor[0, at], descriptor[1, at]
                    if begin == end:
                        break
                    if lane == 0:
                        row, slot, request = descriptor[4, at], descriptor[7, at], descriptor[8, at]
                        pieces.append(Piece(part, request, row, begin, end, slot))
                    piece += 1
                    self.warp.exchange()

            self.warp.run(work)
        return pieces, split_info.array

    def _configured(self, config: DecodeConfig) -> Any:
        """A schedule with the attributes that DecodeKernel gives it."""
        schedule = self.schedule()
        attributes = {
            "heads": config.num_heads, "max_q_len": config.max_q_len, "page_size": config.page_size,
            "ragged": config.ragged, "causal": config.causal, "invariant": config.batch_invariant,
            "tile_rows": config.tile_rows, "max_tiles": config.max_tiles, "block": config.block,
            "q_rows": config.q_rows, "overhead": OVERHEAD,
            "least_payload": 1 if config.few_rows else 2, "descriptors": 8,
            "few": config.few_rows,
        }  # fmt: skip
        for name, value in attributes.items():
            setattr(schedule, name, value)
        return schedule

    def _import(self) -> Any:
        warp = self.warp
        arch = types.SimpleNamespace(
            lane_idx=lambda: warp.here.lane,
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
            make_tensor=lambda pointer, count: Array(pointer.array[:count]),
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
        with mock.patch.dict(sys.modules, stand_ins):
            for name in ("warp", "decode.schedule"):
                full = f"tsmla_kernels.sm90.{name}"
                spec = importlib.util.spec_from_file_location(full, FOLDER / f"{name.replace('.', '/')}.py")
                assert spec is not None and spec.loader is not None
                module = sys.modules[full] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
        self.module = module
        return module.DecodeSchedule
