"""Checks of the schedules that latent attention's kernels make."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tests.emulator.schedule_interpreter import GARBAGE, Piece
from tsmla_kernels.sm90.latent.shape import LatentShape, invariant_piece_blocks, workspace_shapes


def pieces_by_tile(config: LatentShape, queries: np.ndarray, pieces: list[Piece]) -> dict[tuple[int, int], list[Piece]]:
    """The pieces by (request, first row in it) of their row tile: every tile of the queries, and no other."""
    tiles = defaultdict(list)
    for piece in pieces:
        tiles[piece.request, piece.row].append(piece)
    wanted = {(r, row) for r, n in enumerate(queries) for row in range(0, int(n) * config.num_heads, config.tile_rows)}
    assert set(tiles) == wanted
    return tiles


def check(
    flags: tuple[int, int],
    config: LatentShape,
    num_clusters: int,
    lens: np.ndarray,
    queries: np.ndarray,
    pieces: list[Piece],
    split_info: np.ndarray,
) -> None:
    """Everything exactly once, and what `combine` reads is what the pieces say."""
    blocks = np.maximum(-(-lens // config.block), 1)
    starts = np.concatenate([[0], queries.cumsum()]) * config.num_heads
    tiles = pieces_by_tile(config, queries, pieces)
    slots = [piece.slot for piece in pieces if piece.slot >= 0]
    assert len(slots) == len(set(slots))
    written = {slot for slot in range(2 * num_clusters) if split_info[slot, 3] != 0}
    assert written == set(slots) and not np.any(split_info[:, 3] == GARBAGE)
    for (r, row), cut in tiles.items():
        cut.sort(key=lambda piece: piece.begin)
        edges = [0, *(piece.end for piece in cut)]
        assert [piece.begin for piece in cut] == edges[:-1] and edges[-1] == blocks[r]
        if len(cut) == 1:
            assert cut[0].slot == -1
            continue
        # As Combine reads it: the slots of the entry, and one or two halves of a portion for each cluster of it.
        rows = min(config.tile_rows, int(queries[r]) * config.num_heads - row)
        busy = split_info[cut[0].slot, 3] - len(cut)
        assert busy in (0, *flags, sum(flags))
        for place, piece in enumerate(cut):
            assert piece.slot // 2 == piece.cluster and piece.slot % 2 == (piece.begin == 0)
            row_base, row_count, first, count = split_info[piece.slot]
            assert (row_base, row_count, count) == (starts[r] + row, rows, len(cut) + busy)
            assert piece.slot == (first if place == 0 else first + 2 * place - 1)
            assert piece.cluster - first // 2 == place
        for flag, piece in zip(flags, (cut[0], cut[-1]), strict=True):
            if busy & flag:  # never said of a cluster that has nothing else to do
                assert any(other.cluster == piece.cluster and other is not piece for other in pieces)


def check_fixed_cuts(
    config: LatentShape,
    num_clusters: int,
    lens: np.ndarray,
    queries: np.ndarray,
    width: int,
    pieces: list[Piece],
    split_info: np.ndarray,
) -> None:
    """When batch_invariant: everything once, cut where the table's width alone says, in slots that no two tiles share,
    and an entry for every row tile that a request may have."""
    slots = workspace_shapes(config, num_clusters * config.cluster, len(lens), width)["partial_out"][0][0]
    of_tile = slots // (len(lens) * config.max_tiles)
    table_blocks = -(-width * config.page_size // config.block)
    each = max(-(-table_blocks // of_tile), 1)
    assert each <= invariant_piece_blocks(config, width)
    starts = np.concatenate([[0], queries.cumsum()]) * config.num_heads
    tiles = pieces_by_tile(config, queries, pieces)
    entries = split_info[num_clusters:]
    assert len(entries) == len(lens) * config.max_tiles and not np.any(entries[:, 3] == GARBAGE)
    described = {(r * config.max_tiles + row // config.tile_rows) for r, row in tiles}
    assert not entries[[i for i in range(len(entries)) if i not in described], 3].any()
    for (r, row), cut in tiles.items():
        cut.sort(key=lambda piece: piece.begin)
        blocks = max(-(-int(lens[r]) // config.block), 1)
        begins = list(range(0, blocks, each))
        assert [(piece.begin, piece.end) for piece in cut] == [(b, min(b + each, blocks)) for b in begins]
        tile = r * config.max_tiles + row // config.tile_rows
        first, rows = tile * of_tile, min(config.tile_rows, int(queries[r]) * config.num_heads - row)
        assert len(cut) <= of_tile and first + len(cut) <= slots
        assert [piece.slot for piece in cut] == ([-1] if len(cut) == 1 else [first + i for i in range(len(cut))])
        assert tuple(entries[tile]) == (starts[r] + row, rows, first, len(cut) if len(cut) > 1 else 0)
