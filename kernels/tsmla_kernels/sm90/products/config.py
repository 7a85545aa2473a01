"""Which kernel of block-scaled products serves a call: static configurations. Imports no cutlass.

Rows, columns, terms and groups are dynamic: one object serves every matrix. `product_config` picks the tile and how
CTAs share the work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tsmla_kernels.sm90.constants import FP8, SMEM_BYTES

if TYPE_CHECKING:
    from tsmla_kernels.contract.products import ProductSpec, QuantizeBlocksSpec

BLOCK = 128
"""A scale of e4m3 weights belongs to this many terms of this many weight rows. Also how many terms are loaded at once,
unless weights are plain."""
GROUP_ROWS = 64
"""M of a WGMMA: weight rows or, with tokens_first, tokens."""
PAIR_BYTES = 115_712
"""Shared memory of each CTA, in bytes, if a multiprocessor holds two CTAs."""
FIXED_BLOCKS = 4
"""A tile's start and end take as long as this many blocks of terms."""
LEAST_CTAS = 100
"""Fewest CTAs that read weights as fast as memory allows. If there are fewer tiles, each tile's sum may be split among
CTAs."""
LARGE_MEAN = 128
"""If groups have this many rows on average and their sizes are random, a tile of 192 rows holds nearly every group.
An unknown mean is taken to be this."""
ONE_TILE_MEAN = 112
"""If groups have this many rows on average and their sizes are random, a tile of 128 rows holds nearly every group."""
MANY_TILES_MEAN = 384
"""If groups have this many rows on average, few of a group's tiles are not full, whatever their height."""
FEW_MEAN = 10
"""If groups have this many rows on average, a tile of 16 rows serves most of them."""
MULTICAST_MEAN = 240
"""If groups have this many rows on average, pairs of tiles with weights of 16 bits have the weights in common."""
_TIMES = {(2, 1): 1.0, (2, 2): 1.74, (3, 1): 1.4}
"""Measured times of a block of terms of a tile, relative to (2, 1), by (groups, waves)."""
X_DTYPES = (FP8, "bfloat16", "float16")
QUANTIZE_CTAS = 5
"""CTAs of quantize_blocks that a multiprocessor holds at a time."""
_FIXED_BYTES = 2048
"""Bytes of shared memory for barriers and alignment."""


@dataclass(frozen=True)
class ProductConfig:
    """The static choices of a compiled block_scaled_matmul or grouped_block_scaled_matmul. Everything else is dynamic.

    Attributes:
      out_dtype: the dtype of the result. e4m3, which only gated products have, comes with a scale per 128 columns.
      x_dtype: the dtype of the activations: e4m3 with scales, or bfloat16 or float16 without scales.
      packed: whether weights are e2m1, two in a byte, with a scale for every 32 of a row. Only with activations of
        bfloat16.
      plain: whether weights have the dtype of the activations, 16 bits, and no scales. Only with tokens_first. If
        weights are neither packed nor plain, they are e4m3.
      grouped: whether rows of x belong to groups, each with a weight of its own.
      gated: whether the result is silu(x first^T) * (x second^T), where `first` and `second` are the halves of the
        weight. A tile then has as many rows of the first half as of the second.
      picked: whether an index says which row of x each row of the result is made of.
      limit: if gated, the first half's product is limited to at most this, and the second half's to a magnitude of at
        most this; None for no limit.
      tokens: how many rows of x a tile has, a multiple of 8.
      tail: with weights first, a tile whose group has at most this many rows left is multiplied as a tile of this many
        tokens. With tokens_first it is GROUP_ROWS or 0: if it is GROUP_ROWS, a math warpgroup whose tokens all lie past
        the group multiplies nothing. 0 if all tiles are multiplied whole.
      groups: how many math warpgroups a CTA has.
      waves: how many products of a block of terms each math warpgroup computes, one after the other (if plain,
        together).
      tokens_first: whether M of a WGMMA are 64 of the tile's tokens, and N are 128 weight rows (if plain, all of the
        tile's); otherwise M are 64 of the tile's weight rows, and N are all of its tokens.
      splits: if more than one, how many CTAs a cluster has; each sums a part of the terms of one tile, and the first
        adds these up.
      multicast: whether the two CTAs of a cluster have their weights in common: one's tile has the rows of x behind the
        other's, and each loads half of the weights into both. Only with whole sums, and not with packed weights.
      level: whether a group's rows are shared out evenly among its tiles, in eights, so that more tiles have at most
        `tail` rows. Not with multicast.
      ctas: how many CTAs a multiprocessor holds at a time.
      num_sms: how many multiprocessors the GPU has.
    """

    out_dtype: str = "bfloat16"
    x_dtype: str = FP8
    grouped: bool = False
    tokens: int = 128
    groups: int = 2
    waves: int = 2
    tokens_first: bool = False
    splits: int = 1
    ctas: int = 1
    num_sms: int = 132
    gated: bool = False
    limit: float | None = None
    picked: bool = False
    tail: int = 0
    packed: bool = False
    plain: bool = False
    multicast: bool = False
    level: bool = False

    @property
    def cluster(self) -> int:
        """How many CTAs a cluster has."""
        return 2 if self.multicast else self.splits

    @property
    def may_multicast(self) -> bool:
        """Whether `multicast` goes with the other attributes."""
        return self.splits == 1 and not self.packed

    @property
    def handed(self) -> bool:
        """Whether the copying warp hands the tiles that it finds to the math warps, which find them otherwise. Only
        tiles of many rows of groups: no others were timed."""
        return self.grouped and self.tokens >= BLOCK

    @property
    def cluster_tokens(self) -> int:
        """Rows of x of the tiles of a cluster."""
        return self.tokens * 2 if self.multicast else self.tokens

    @property
    def loaded_rows(self) -> int:
        """Weight rows that a CTA loads."""
        return self.rows // 2 if self.multicast else self.rows

    @property
    def quantized(self) -> bool:
        """Whether the result is e4m3, with scales."""
        return self.out_dtype == FP8

    @property
    def width(self) -> int:
        """Columns of the result of a tile."""
        return self.rows // 2 if self.gated else self.rows

    @property
    def wide(self) -> bool:
        """Whether x has 16 bits. Weights are then widened, unless they are plain."""
        return self.x_dtype != FP8

    @property
    def block_terms(self) -> int:
        """How many terms a block has."""
        return BLOCK // 2 if self.plain else BLOCK

    @property
    def x_boxes(self) -> int:
        """How many boxes a block of x has. A box has 128 bytes of each of the tile's rows."""
        return 2 if self.wide and not self.plain else 1

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return BLOCK * self.waves if self.tokens_first else self.groups * GROUP_ROWS * self.waves

    @property
    def columns(self) -> int:
        """Columns of a wave's product: all tokens of the tile or, with tokens_first, 128 weight rows. They are N of a
        WGMMA, except in a tile of `tail` tokens, and with plain weights, where one WGMMA computes all waves."""
        return BLOCK if self.tokens_first else self.tokens

    @property
    def threads(self) -> int:
        """Threads of the math warpgroups."""
        return 128 * self.groups

    @property
    def persistent(self) -> bool:
        """Whether a CTA may compute several tiles. CTAs that share the sum of a tile compute only that tile."""
        return self.splits == 1

    @property
    def registers(self) -> tuple[int, int]:
        """How many registers a thread of a math warpgroup has, and how many a thread of the other warps. In all they
        must be no more than the CTA starts with; otherwise it would wait for registers forever."""
        if self.groups == 3:
            return 160, 32
        if self.ctas == 2:
            return 96, 40
        # If results are e4m3 and sums are split, 40 registers are too few for the other warps: they would spill.
        return (216, 72) if self.quantized and self.splits > 1 else (232, 40)

    @property
    def scale_blocks(self) -> int:
        """How many blocks of 128 weight rows, each with scales of its own, a tile may reach into; if gated, one of each
        half of the weight."""
        return 2 if self.gated else -(-self.rows // BLOCK)

    @property
    def block_scales(self) -> int:
        """How many scales a stage has for each block of 128 weight rows, if they have scales: one for each token, or a
        single one if x has 16 bits."""
        return 1 if self.wide else self.tokens

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight row in a block."""
        return BLOCK // 2 if self.packed else BLOCK

    @property
    def scale_words(self) -> int:
        """How many words a stage has for scales, rounded up to a multiple of 4. Packed weights have a word for each
        row: the exponents of a block's four scales. Plain weights have none, but the space must not be empty."""
        if self.plain:
            return 4
        if self.packed:
            return self.rows
        return -(-self.scale_blocks * self.block_scales // 4) * 4

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: a block of terms of the tile's weights and of x."""
        return self.rows * self.weight_bytes + self.tokens * self.x_boxes * BLOCK

    @property
    def copied_bytes(self) -> int:
        """Bytes of a stage that TMA copies: all but picked rows of x."""
        return self.rows * self.weight_bytes if self.picked else self.stage_bytes

    @property
    def pass_columns(self) -> int:
        """How many columns of 16-bit results a warp stages at a time, for 16 tokens, if tokens_first."""
        return 64 // (self.groups - 1)

    @property
    def stored_tokens(self) -> int:
        """How many tokens a warp stages at a time, for 16 columns of 16-bit results, unless tokens_first or gated."""
        return min(max(self.tokens, 16), 64 // (self.groups - 1))

    @property
    def staging_bytes(self) -> int:
        """Bytes of shared memory in which a warp stages results before it stores them."""
        return 2 * 16 * (self.pass_columns if self.tokens_first else self.stored_tokens)

    @property
    def amax_words(self) -> int:
        """How many words of shared memory hold, for each token, the greatest magnitude of each math warp's results and
        their scale. With tokens_first none are needed: a warp has all 128 columns that share a scale."""
        return self.tokens * (self.threads // 32 + 1) if self.quantized and not self.tokens_first else 0

    @property
    def partial_bytes(self) -> int:
        """Bytes of the sums that a CTA of a cluster hands to the first CTA."""
        return 4 * self.rows * self.tokens

    @property
    def has_room(self) -> bool:
        """Whether the sums of the cluster's other CTAs fit where the stages are."""
        return (self.splits - 1) * self.partial_bytes <= self.stages * self.stage_bytes

    @property
    def stages(self) -> int:
        """How many blocks of terms shared memory holds, at most 12."""
        left = (SMEM_BYTES if self.ctas == 1 else PAIR_BYTES) - _FIXED_BYTES
        left -= self.threads // 32 * self.staging_bytes + 4 * self.amax_words
        return min(left // (self.stage_bytes + 4 * self.scale_words), 12)


@dataclass(frozen=True)
class QuantizeConfig:
    """The static choices of a compiled quantize_blocks. Everything else is dynamic.

    Attributes:
      in_dtype: the dtype of the activations. power_of_two: whether scales are rounded up to powers of two.
      num_ctas: how many CTAs a launch has at most. A CTA takes 32 blocks at a time. If there are more blocks than all
      CTAs take at once, each CTA takes further blocks in turn.
    """

    in_dtype: str
    power_of_two: bool = False
    num_ctas: int = 132 * QUANTIZE_CTAS


def quantize_reasons(spec: QuantizeBlocksSpec) -> list[str]:
    """Why the kernel cannot run this call; empty if it can."""
    kernel, terms = "the kernel of quantize_blocks", spec.shape[-1]
    return [f"K is {terms}; {kernel} takes a multiple of 8"] if terms % 8 else []


def quantize_config(spec: QuantizeBlocksSpec, num_sms: int = 132) -> QuantizeConfig:
    """The configuration that serves `spec` on a GPU with `num_sms` multiprocessors."""
    return QuantizeConfig(spec.in_dtype, spec.power_of_two, QUANTIZE_CTAS * num_sms)


def product_reasons(spec: ProductSpec) -> list[str]:
    """Why the kernel cannot run this call; empty if it can."""
    kernel, reasons = "the sm_90 kernel of block-scaled products", []
    if spec.x_dtype not in X_DTYPES:
        reasons.append(f"x's dtype is {spec.x_dtype}; {kernel} takes {', '.join(X_DTYPES)}")
    if spec.packed and spec.x_dtype != "bfloat16":
        reasons.append(f"x's dtype is {spec.x_dtype}; {kernel} takes bfloat16 with packed weights")
    columns = 2 * BLOCK if spec.gated else 8  # gated: a tile has whole blocks of both halves of the weight
    # Packed: the exponents of a block's scales are loaded as one word.
    for letter, size, multiple in (
        ("K", spec.num_terms, BLOCK if spec.packed else 16),
        ("N", spec.num_columns, columns),
    ):
        if not isinstance(size, int):
            reasons.append(f"{letter} is symbolic; {kernel} takes a static one")
        elif size % multiple:
            form = " if gated" if multiple == 2 * BLOCK else " with packed weights" if multiple == BLOCK else ""
            reasons.append(f"{letter} is {size}; {kernel} takes a multiple of {multiple}{form}")
    return reasons


def product_config(spec: ProductSpec, num_sms: int = 132) -> ProductConfig:
    """The configuration that serves `spec` on a GPU with `num_sms` multiprocessors. Every configuration with these
    dtypes serves any number of rows; this is the one that should be fastest. A symbolic number of rows or groups is
    taken to be large."""
    rows, groups = spec.num_rows, spec.num_groups
    config = ProductConfig(
        spec.out_dtype, spec.x_dtype, groups is not None, num_sms=num_sms, gated=spec.gated, limit=spec.limit
    )
    config = replace(config, picked=spec.num_picked is not None, packed=spec.packed, plain=spec.plain)
    if groups is not None:
        if not isinstance(rows, int) or not isinstance(groups, int):
            return _grouped(config, LARGE_MEAN)
        config = _grouped(config, -(-rows // groups))
        # Nearly as many tiles of rows as rows: if these take several rounds, smaller tiles waste less of the last one.
        apart = rows <= 2 * groups and config.wide and not config.quantized and not config.packed and not config.plain
        rounds = rows * -(-spec.num_columns // config.rows) > config.num_sms
        return replace(config, waves=1) if apart and rounds else config
    return _dense(config, spec, rows if isinstance(rows, int) else 4096)


def _grouped(config: ProductConfig, mean: int) -> ProductConfig:
    """The configuration for groups of `mean` rows on average, the fastest of those that LOG.md lists. With few rows
    reading the weights takes most of the time, so a tile holds all rows of most groups. A second tile of a group reads
    the group's weights again, from L2."""
    if config.plain:
        multicast = mean >= MULTICAST_MEAN and not config.picked
        return replace(config, tokens_first=True, tail=GROUP_ROWS, multicast=multicast)
    few = not (config.gated or config.picked)  # two CTAs have room on a multiprocessor
    if mean <= FEW_MEAN and (config.wide or mean <= 2):
        config = replace(config, tokens=16)
        return replace(config, waves=1, ctas=2) if few else config
    if config.wide:
        return _grouped_wide(config, mean)
    if mean <= 40:
        tokens = 64 if few or mean > 24 else 16 if mean <= FEW_MEAN else 32
        return _whole_blocks(replace(config, tokens=tokens, waves=1))
    config = replace(config, tokens_first=True)
    # With picked rows the other warps need more registers than three math warpgroups leave.
    whole = mean <= ONE_TILE_MEAN or mean >= MANY_TILES_MEAN or config.quantized or config.picked
    return config if whole else replace(config, tokens=192, groups=3, waves=1, tail=GROUP_ROWS)


def _grouped_wide(config: ProductConfig, mean: int) -> ProductConfig:
    """`_grouped` for x of 16 bits."""
    if mean <= 24:
        return replace(config, tokens=32, tail=16)
    if mean <= 48:
        return replace(config, tokens=48, tail=24)
    if mean <= 80:
        return replace(config, tokens=96, tail=48)
    second = ONE_TILE_MEAN < mean <= 150 or mean >= MANY_TILES_MEAN
    if second and not config.picked and not config.packed and not config.quantized:
        return replace(config, tokens=152, waves=1, tail=136, level=True)
    return replace(config, tokens=176, waves=1) if ONE_TILE_MEAN < mean <= 160 and not config.gated else config


def _whole_blocks(config: ProductConfig) -> ProductConfig:
    """`config`, changed if results are e4m3: a tile then has all 128 columns that share a scale."""
    return replace(config, waves=2, groups=2, ctas=1) if config.quantized else config


def _dense(config: ProductConfig, spec: ProductSpec, rows: int) -> ProductConfig:
    blocks = -(-spec.num_terms // BLOCK)
    if rows <= 64:
        tokens = next(tokens for tokens in (8, 16, 32, 64) if rows <= tokens)
        candidates = [_whole_blocks(replace(config, tokens=tokens, waves=1, ctas=2 if tokens <= 32 else 1))]
        if tokens == 64 and not config.wide and not config.gated:
            candidates.append(replace(candidates[0], groups=3))
        if tokens <= 16 and config.wide and not config.gated and not config.packed:
            at_once = replace(config, tokens=tokens, groups=3, waves=1)
            if LEAST_CTAS <= _tiles(at_once, rows, spec.num_columns) <= config.num_sms:
                return at_once
    elif config.wide:
        candidates = [config] if config.quantized else [replace(config, waves=1), config]
    else:
        config = replace(config, tokens_first=True)
        candidates = [config]
        if not config.quantized:
            candidates = [replace(config, waves=1), config, replace(config, tokens=192, groups=3, waves=1)]

    def time(config: ProductConfig) -> float:
        """An estimate proportional to the busiest CTA's time. A tile's start and end count as FIXED_BLOCKS blocks."""
        tiles = _tiles(config, rows, spec.num_columns)
        rounds = -(-tiles // (config.num_sms * config.ctas))
        return rounds * (blocks + FIXED_BLOCKS) * _TIMES.get((config.groups, config.waves), 1.0)

    best = min(reversed(candidates), key=time)
    if best.quantized and best.tokens > 64:
        return best  # a split sum would need more registers than there are
    tiles = _tiles(best, rows, spec.num_columns)
    most = 2 * LEAST_CTAS if config.wide else config.num_sms
    split = (replace(best, splits=splits) for splits in (8, 4, 2) if splits <= blocks and tiles * splits <= most)
    return next((config for config in split if config.has_room and tiles < LEAST_CTAS), best)


def _tiles(config: ProductConfig, rows: int, columns: int) -> int:
    return -(-rows // config.tokens) * -(-columns // config.rows)
