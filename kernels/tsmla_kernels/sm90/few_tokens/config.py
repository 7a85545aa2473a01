"""Which kernels of few tokens serve which calls (few_token_index_key: `index_key_config`). Imports no cutlass.

The calls are those of a decoder layer's step of up to MOST_TOKENS tokens, whose time is that of reading the weights and
of starting kernels. A spec has the sizes of a call; an object is compiled for the fields of a config, and reads all
other sizes at the launch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tsmla_kernels.contract.layouts import V32_PACKED
from tsmla_kernels.sm90.constants import FP8

MOST_TOKENS = 16
TOKEN_TILE = 8
"""Columns of a tensor core's product: tokens come in tiles of so many."""
TILE_ROWS = 16
"""Weight rows of a product: a CTA's, or a warp's in few_token_queries."""
UNIT = 128
"""Terms that a warp multiplies at a time, and for which block-scaled weights have one scale."""
WARPS = 8
WEIGHTS = ("bfloat16", FP8)
CACHES = ("bfloat16", FP8)
NORMS = ("bfloat16", "float32")
"""Dtypes of the layer norm of the indexer's keys."""
PACKED = "uint8"
"""The dtype of a cache of V3.2's packed rows."""
MOST_EXPERTS = 512
"""Experts among which a warp chooses: their scores lie in registers."""
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
LOW_COLUMNS, MOST_RANK = 256, 2048
"""Columns of a low-rank query that a warp of few_token_window loads at a time, and at most."""
REGISTERS, SIXTEEN, HALVES = "registers", "sixteen", "halves"
"""How a kernel reads its weights: straight to registers; or, for one token, through a ring in shared memory, in tiles
of sixteen rows, or of eight rows whose first and second half of terms are multiplied at once."""
MOST_TERMS, MOST_NORMED_TERMS = 18_432, 12_288
"""Terms of a token, or of all its experts' second products, that have room beside the ring: in shared memory without a
norm, in registers with one."""
LOADED_TERMS = 2048
"""Terms that a CTA loads at once to bring them there."""


@dataclass(frozen=True)
class MatmulSpec:
    """A call of few_token_matmul: tokens, terms (K) and weight rows (N) of the product; the other fields as in
    MatmulConfig."""

    tokens: int
    terms: int
    rows: int
    weight_dtype: str
    eps: float | None = None
    gated: bool = False
    limit: float | None = None
    residual: bool = False


@dataclass(frozen=True)
class MatmulConfig:
    """The static facts that an object of few_token_matmul is compiled for.

    Attributes:
      weight_dtype: "bfloat16", or FP8 for e4m3 with a scale for each block of 128 x 128.
      token_tiles: how many tiles of TOKEN_TILE tokens the call's tokens take.
      eps: of the RMS norm through which x goes first; None for no norm.
      gated: the result has N / 2 columns, silu(x W_gate^T) * (x W_up^T).
      limit: if gated, gate is clipped to at most `limit`, and up to [-limit, limit]; None clips nothing.
      residual: whether an array is added to the result.
      form: REGISTERS, or for one token SIXTEEN or, unless gated, HALVES.
      loads: with a ring, how often LOADED_TERMS are loaded to bring all terms; else 0.
    """

    weight_dtype: str
    token_tiles: int = 1
    eps: float | None = None
    gated: bool = False
    limit: float | None = None
    residual: bool = False
    form: str = REGISTERS
    loads: int = 0

    @property
    def narrow(self) -> bool:
        """Whether the weights are block-scaled."""
        return self.weight_dtype == FP8


@dataclass(frozen=True)
class ExpertsSpec:
    """A call of few_token_experts_up or few_token_experts_down: `tokens` tokens with `choices` experts each, of
    `hidden` columns; an expert's width; the other fields as in ExpertsConfig."""

    tokens: int
    choices: int
    hidden: int
    width: int
    weight_dtype: str
    eps: float | None = None
    limit: float | None = None
    residual: bool = True


@dataclass(frozen=True)
class ExpertsConfig:
    """The static facts that an object of few_token_experts_up or few_token_experts_down is compiled for.

    Attributes:
      weight_dtype, token_tiles, eps, limit: as in MatmulConfig; eps and limit are None in few_token_experts_down.
      choices: how many experts a token has, the shared ones among them.
      residual: in few_token_experts_down, whether an array is added to the result.
      form, loads: as in MatmulConfig; REGISTERS in few_token_experts_up.
    """

    weight_dtype: str
    choices: int
    token_tiles: int = 1
    eps: float | None = None
    limit: float | None = None
    residual: bool = True
    form: str = REGISTERS
    loads: int = 0

    @property
    def narrow(self) -> bool:
        """Whether the weights are block-scaled."""
        return self.weight_dtype == FP8


@dataclass(frozen=True)
class ChoiceSpec:
    """A call of few_token_choose_up: `hidden` columns of x, an expert's `width`, and how the token chooses. For the
    other fields see ChoiceConfig."""

    hidden: int
    width: int
    weight_dtype: str
    num_experts: int
    top_k: int
    num_shared: int = 0
    routing: str = "greedy"
    scoring: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    eps: float | None = None
    limit: float | None = None
    ahead: bool = False


@dataclass(frozen=True)
class ChoiceConfig:
    """The static facts that an object of few_token_choose_up is compiled for.

    Attributes:
      weight_dtype, eps, limit: as in ExpertsConfig.
      form: REGISTERS or SIXTEEN. loads: as in MatmulConfig.
      ahead: rows of a tile of the second products, whose first weights come to L2 at the end; 0 without these weights.
      num_experts, top_k, num_shared, routing, scoring, n_group, topk_group, norm_topk_prob, routed_scaling_factor: as
        in `tsmla_jax.generate.config.MoEConfig`.
    """

    weight_dtype: str
    num_experts: int
    top_k: int
    num_shared: int = 0
    routing: str = "greedy"
    scoring: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    eps: float | None = None
    limit: float | None = None
    form: str = REGISTERS
    loads: int = 0
    ahead: int = 0

    @property
    def narrow(self) -> bool:
        """Whether the weights are block-scaled."""
        return self.weight_dtype == FP8

    @property
    def choices(self) -> int:
        """How many experts the token has, the shared ones among them."""
        return self.top_k + self.num_shared

    @property
    def biased(self) -> bool:
        """Whether a bias is added to the scores that select."""
        return self.routing == "noaux_tc"

    @property
    def limits_groups(self) -> bool:
        """Whether experts outside the best groups are left out."""
        return self.routing != "greedy" and self.n_group > 1

    @property
    def experts(self) -> ExpertsConfig:
        """The configuration of the products."""
        return ExpertsConfig(self.weight_dtype, self.choices, 1, eps=self.eps, limit=self.limit)


@dataclass(frozen=True)
class QueriesSpec:
    """A call of few_token_queries: tokens, H heads of N columns without rope, L latent and R rope columns."""

    tokens: int
    heads: int
    nope_dim: int
    latent_dim: int
    rope_dim: int
    q_dtype: str
    kv_dtype: str
    rope_interleave: bool
    rope_layout: str
    eps: float


@dataclass(frozen=True)
class QueriesConfig:
    """The static facts that an object of few_token_queries is compiled for.

    Attributes:
      token_tiles: as in MatmulConfig.
      q_dtype: the dtype of the absorbed queries. kv_dtype: the dtype of the cache, PACKED for packed rows.
      nope_dim, latent_dim, rope_dim: N, L and R.
      rope_interleave, rope_layout: as in rope_write_kv_cache.
      eps: of the latent's RMS norm.
    """

    token_tiles: int
    q_dtype: str
    kv_dtype: str
    nope_dim: int = 128
    latent_dim: int = 512
    rope_dim: int = 64
    rope_interleave: bool = True
    rope_layout: str = "interleaved"
    eps: float = 1e-6

    @property
    def packed(self) -> bool:
        """Whether the cache has V3.2's packed rows."""
        return self.kv_dtype == PACKED

    @property
    def row_width(self) -> int:
        """The last size of the cache."""
        return V32_PACKED.row_bytes if self.packed else self.latent_dim + self.rope_dim


@dataclass(frozen=True)
class RouterSpec:
    """A call of few_token_router: how many tokens, columns of x (`terms`) and experts it has; eps as in
    RouterConfig."""

    tokens: int
    terms: int
    experts: int
    eps: float | None = None


@dataclass(frozen=True)
class RouterConfig:
    """The static facts that an object of few_token_router is compiled for.

    Attributes:
      tokens: for how many tokens a warp has sums: the least power of two that is at least the call's tokens.
      eps: as in MatmulConfig.
    """

    tokens: int
    eps: float | None = None


@dataclass(frozen=True)
class WindowSpec:
    """A call of few_token_window: how many tokens it has; the other fields as in WindowConfig."""

    tokens: int
    page_size: int
    rank: int
    low_eps: float
    eps: float


@dataclass(frozen=True)
class WindowConfig:
    """The static facts that an object of few_token_window is compiled for.

    Attributes:
      page_size: how many rows a page has.
      rank: columns of the low-rank query.
      low_eps, eps: of the norms of the query and of the latent.
    """

    page_size: int = 64
    rank: int = 1024
    low_eps: float = 1e-6
    eps: float = 1e-6


def token_tiles(tokens: int) -> int:
    """Tiles of TOKEN_TILE tokens."""
    return -(-tokens // TOKEN_TILE)


def token_reasons(tokens: int) -> list[str]:
    if 0 < tokens <= MOST_TOKENS:
        return []
    return [f"there are {tokens} tokens; the kernels of few tokens take 1 to {MOST_TOKENS}"]


def _weight_reasons(dtype: str, terms: int, rows: int, gated: bool) -> list[str]:
    reasons = []
    if dtype not in WEIGHTS:
        reasons.append(f"weight.dtype is {dtype}; the kernels of few tokens take {', '.join(WEIGHTS)}")
    if terms < UNIT or terms % UNIT:
        reasons.append(f"the weight has {terms} terms; the kernels of few tokens take multiples of {UNIT}")
    legal = 2 * TOKEN_TILE if gated else TOKEN_TILE
    if rows < legal or rows % legal:
        reasons.append(f"the weight has {rows} rows; the kernels of few tokens take multiples of {legal}")
    return reasons


def matmul_reasons(spec: MatmulSpec) -> list[str]:
    """Why few_token_matmul can't run this call; empty if it can."""
    return token_reasons(spec.tokens) + _weight_reasons(spec.weight_dtype, spec.terms, spec.rows, spec.gated)


def matmul_config(spec: MatmulSpec) -> MatmulConfig:
    """The configuration that serves `spec`."""
    few_ctas = spec.rows <= _FEW_ROWS and spec.terms >= _LONG_TERMS and spec.terms % (2 * UNIT) == 0
    helps = spec.weight_dtype == FP8 or few_ctas or 2 * spec.terms * spec.rows >= _LARGE
    rings = spec.tokens == 1 and helps and not too_long(spec.terms, spec.eps)
    return MatmulConfig(
        spec.weight_dtype,
        token_tiles(spec.tokens),
        eps=spec.eps,
        gated=spec.gated,
        limit=spec.limit,
        residual=spec.residual,
        form=_tiles(spec) if rings else REGISTERS,
        loads=_loads(spec.terms) if rings else 0,
    )


def too_long(terms: int, eps: float | None) -> bool:
    """Whether a token's terms have no room beside the ring. eps: of its norm, None for no norm."""
    return terms > (MOST_TERMS if eps is None else MOST_NORMED_TERMS)


def _loads(terms: int) -> int:
    """How often LOADED_TERMS are loaded to bring so many."""
    return -(-terms // LOADED_TERMS)


def _tiles(spec: MatmulSpec) -> str:
    """How the ring's tiles are made: SIXTEEN or HALVES."""
    # A tile of eight rows is the smaller part of a CTA's work, but half of a short row leaves most of a stage empty.
    row_bytes = spec.terms if spec.weight_dtype == FP8 else 2 * spec.terms
    return HALVES if not spec.gated and spec.terms % (2 * UNIT) == 0 and row_bytes >= _LONG_ROW else SIXTEEN


_LARGE = 1 << 25
"""Bytes of a bf16 matrix from which on it is read through a ring."""
_FEW_ROWS, _LONG_TERMS = 512, 4096
"""A bf16 matrix of so few and so long rows is read through a ring, too: few multiprocessors read it, and each has more
bytes on their way so. Others are read no faster."""
_LONG_ROW = 2048
"""Bytes of a weight row from which on its halves are multiplied at once."""


def experts_reasons(spec: ExpertsSpec) -> list[str]:
    """Why few_token_experts_up and few_token_experts_down can't run this call; empty if they can."""
    reasons = token_reasons(spec.tokens)
    reasons += _weight_reasons(spec.weight_dtype, spec.hidden, 2 * spec.width, gated=True)
    if spec.width % UNIT:
        reasons.append(f"an expert is {spec.width} wide; the kernels of few tokens take multiples of {UNIT}")
    if not 0 < spec.choices <= MOST_TOKENS:
        reasons.append(f"a token has {spec.choices} experts; the kernels of few tokens take 1 to {MOST_TOKENS}")
    return reasons


def experts_up_config(spec: ExpertsSpec) -> ExpertsConfig:
    """The configuration of few_token_experts_up that serves `spec`."""
    return ExpertsConfig(
        spec.weight_dtype,
        spec.choices,
        token_tiles(spec.tokens),
        eps=spec.eps,
        limit=spec.limit,
        residual=spec.residual,
    )


def experts_down_config(spec: ExpertsSpec) -> ExpertsConfig:
    """The configuration of few_token_experts_down that serves `spec`."""
    rows = MatmulSpec(spec.tokens, spec.width, spec.hidden, spec.weight_dtype)
    config, held = experts_up_config(spec), spec.choices * spec.width
    if spec.tokens > 1 or too_long(held, None):
        return config
    return dataclasses.replace(config, form=_tiles(rows), loads=_loads(held))


def choice_reasons(spec: ChoiceSpec) -> list[str]:
    """Why few_token_choose_up can't run this call; empty if it can."""
    experts = ExpertsSpec(1, spec.top_k + spec.num_shared, spec.hidden, spec.width, spec.weight_dtype)
    reasons = experts_reasons(experts)
    if not spec.top_k <= spec.num_experts <= MOST_EXPERTS:
        reasons.append(
            f"there are {spec.num_experts} experts; few_token_choose_up takes {spec.top_k} to {MOST_EXPERTS}"
        )
    if spec.scoring not in SCORINGS:
        reasons.append(f"scoring is {spec.scoring}; few_token_choose_up takes {', '.join(SCORINGS)}")
    if spec.routing != "greedy" and spec.n_group > 1:
        held, group = -(-spec.num_experts // 32), spec.num_experts // spec.n_group
        lanes = group // held
        if spec.num_experts % spec.n_group or group % held or lanes & (lanes - 1):
            reasons.append(
                f"{spec.num_experts} experts are in {spec.n_group} groups; few_token_choose_up takes groups of a power"
                f" of two times {held} experts"
            )
    return reasons


def choice_config(spec: ChoiceSpec) -> ChoiceConfig:
    """The configuration that serves `spec`."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(ChoiceSpec)}
    hidden, width, ahead = fields.pop("hidden"), fields.pop("width"), fields.pop("ahead")
    if too_long(hidden, spec.eps):
        return ChoiceConfig(**fields)
    choices = spec.top_k + spec.num_shared
    down = experts_down_config(ExpertsSpec(1, choices, hidden, width, spec.weight_dtype))
    tile = {REGISTERS: 0, SIXTEEN: TILE_ROWS, HALVES: TOKEN_TILE}[down.form] if ahead else 0
    return ChoiceConfig(**fields, form=SIXTEEN, loads=_loads(hidden), ahead=tile)


def queries_reasons(spec: QueriesSpec) -> list[str]:
    """Why few_token_queries can't run this call; empty if it can."""
    reasons = token_reasons(spec.tokens)
    for name, dtype, legal in (("q_dtype", spec.q_dtype, CACHES), ("kv_cache.dtype", spec.kv_dtype, (*CACHES, PACKED))):
        if dtype not in legal:
            reasons.append(f"{name} is {dtype}; few_token_queries takes {', '.join(legal)}")
    widths = V32_PACKED.latent_dim, V32_PACKED.rope_dim
    if spec.kv_dtype == PACKED and (spec.latent_dim, spec.rope_dim) != widths:
        reasons.append(f"packed rows have {widths[0]} latent and {widths[1]} rope columns")
    if spec.nope_dim % UNIT or not spec.nope_dim:
        reasons.append(f"a head has {spec.nope_dim} columns without rope; few_token_queries takes multiples of {UNIT}")
    if spec.latent_dim % UNIT or not 0 < spec.latent_dim <= 1024:
        reasons.append(f"a latent has {spec.latent_dim} columns; few_token_queries takes multiples of {UNIT} to 1024")
    if spec.rope_dim % 8 or not 0 < spec.rope_dim <= 256:
        reasons.append(f"{spec.rope_dim} columns have rope; few_token_queries takes multiples of 8 to 256")
    return reasons


def queries_config(spec: QueriesSpec) -> QueriesConfig:
    """The configuration that serves `spec`."""
    return QueriesConfig(
        token_tiles(spec.tokens),
        spec.q_dtype,
        spec.kv_dtype,
        nope_dim=spec.nope_dim,
        latent_dim=spec.latent_dim,
        rope_dim=spec.rope_dim,
        rope_interleave=spec.rope_interleave,
        rope_layout=spec.rope_layout,
        eps=spec.eps,
    )


def router_reasons(spec: RouterSpec) -> list[str]:
    """Why few_token_router can't run this call; empty if it can."""
    reasons = token_reasons(spec.tokens)
    if spec.terms % UNIT or not spec.terms:
        reasons.append(f"the router has {spec.terms} columns; few_token_router takes multiples of {UNIT}")
    return reasons


def router_config(spec: RouterSpec) -> RouterConfig:
    """The configuration that serves `spec`."""
    return RouterConfig(1 << (spec.tokens - 1).bit_length(), spec.eps)


def window_reasons(spec: WindowSpec) -> list[str]:
    """Why few_token_window can't run this call; empty if it can."""
    reasons = token_reasons(spec.tokens)
    if spec.rank % LOW_COLUMNS or not 0 < spec.rank <= MOST_RANK:
        legal = f"multiples of {LOW_COLUMNS} to {MOST_RANK}"
        reasons.append(f"the query's low rank is {spec.rank}; few_token_window takes {legal}")
    return reasons


def window_config(spec: WindowSpec) -> WindowConfig:
    """The configuration that serves `spec`."""
    return WindowConfig(spec.page_size, spec.rank, spec.low_eps, spec.eps)
