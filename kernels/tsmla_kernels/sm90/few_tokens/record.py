"""The kernels of few tokens on Hopper: operands and records."""

from __future__ import annotations

from tsmla_kernels.contract.layouts import INDEXER, V4_PACKED
from tsmla_kernels.kernel import Kernel, Operand
from tsmla_kernels.options import (
    few_token_choose_up_spec,
    few_token_experts_down_spec,
    few_token_experts_up_spec,
    few_token_index_key_spec,
    few_token_inputs_spec,
    few_token_matmul_spec,
    few_token_outputs_spec,
    few_token_queries_spec,
    few_token_read_streams_spec,
    few_token_router_spec,
    few_token_values_spec,
    few_token_window_spec,
    few_token_write_streams_spec,
)
from tsmla_kernels.sm90.few_tokens.config import (
    ChoiceConfig,
    ExpertsConfig,
    MatmulConfig,
    QueriesConfig,
    RouterConfig,
    WindowConfig,
    choice_config,
    choice_reasons,
    experts_down_config,
    experts_reasons,
    experts_up_config,
    matmul_config,
    matmul_reasons,
    queries_config,
    queries_reasons,
    router_config,
    router_reasons,
    window_config,
    window_reasons,
)
from tsmla_kernels.sm90.few_tokens.index_key_config import IndexKeyConfig, index_key_config, index_key_reasons
from tsmla_kernels.sm90.few_tokens.latent_config import (
    InputsConfig,
    OutputsConfig,
    inputs_config,
    inputs_reasons,
    outputs_config,
    outputs_reasons,
)
from tsmla_kernels.sm90.few_tokens.streams_config import (
    SUMS,
    ReadStreamsConfig,
    WriteStreamsConfig,
    mix_rows,
    read_streams_config,
    read_streams_reasons,
    write_streams_config,
    write_streams_reasons,
)
from tsmla_kernels.sm90.few_tokens.values_config import LATENT, ValuesConfig, values_config, values_reasons

BF16 = "bfloat16"


def scales(given: bool, *stack: None) -> tuple[Operand, ...]:
    """The operand `weight_scales` if `given`, else none. stack: the sizes before the last two."""
    return (Operand("weight_scales", "float32", (*stack, None, None), align=4),) if given else ()


def matmul_operands(config: MatmulConfig) -> tuple[Operand, ...]:
    """The operands. All sizes are read at the launch."""
    return (
        Operand("x", BF16, (None, None)),
        Operand("weight", config.weight_dtype, (None, None)),
        *scales(config.narrow),
        *((Operand("norm_weight", BF16, (None,)),) if config.eps is not None else ()),
        *((Operand("residual", BF16, (None, None)),) if config.residual else ()),
        Operand("out", BF16, (None, None), output=True),
    )


FEW_TOKEN_MATMUL = Kernel(
    name="few_token_matmul",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.launchers:matmul",
    config=MatmulConfig,
    operands=matmul_operands,
    spec_from_options=few_token_matmul_spec,
    reasons=matmul_reasons,
    config_for=matmul_config,
    presets=(),
)


def experts_up_operands(config: ExpertsConfig) -> tuple[Operand, ...]:
    """The operands. All sizes but the number of a token's experts are read at the launch."""
    return (
        Operand("x", BF16, (None, None)),
        Operand("weight", config.weight_dtype, (None, None, None)),
        *scales(config.narrow, None),
        *((Operand("norm_weight", BF16, (None,)),) if config.eps is not None else ()),
        Operand("experts", "int32", (None, config.choices), align=4),
        Operand("out", BF16, (None, None), output=True),
    )


FEW_TOKEN_EXPERTS_UP = Kernel(
    name="few_token_experts_up",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.experts_up:FewTokenExpertsUp",
    config=ExpertsConfig,
    operands=experts_up_operands,
    spec_from_options=few_token_experts_up_spec,
    reasons=experts_reasons,
    config_for=experts_up_config,
    presets=(),
)


def experts_down_operands(config: ExpertsConfig) -> tuple[Operand, ...]:
    """The operands. All sizes but the number of a token's experts are read at the launch."""
    return (
        Operand("x", BF16, (None, None)),
        Operand("weight", config.weight_dtype, (None, None, None)),
        *scales(config.narrow, None),
        Operand("experts", "int32", (None, config.choices), align=4),
        Operand("weights", "float32", (None, config.choices), align=4),
        *((Operand("residual", BF16, (None, None)),) if config.residual else ()),
        Operand("out", BF16, (None, None), output=True),
    )


FEW_TOKEN_EXPERTS_DOWN = Kernel(
    name="few_token_experts_down",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.launchers:experts_down",
    config=ExpertsConfig,
    operands=experts_down_operands,
    spec_from_options=few_token_experts_down_spec,
    reasons=experts_reasons,
    config_for=experts_down_config,
    presets=(),
)


def queries_operands(config: QueriesConfig) -> tuple[Operand, ...]:
    """The operands. All sizes but N, L and R are read at the launch."""
    latent, width = config.latent_dim, config.latent_dim + config.rope_dim
    return (
        Operand("q", BF16, (None, None)),
        Operand("joint", BF16, (None, None)),
        Operand("w_uk", BF16, (None, latent, config.nope_dim)),
        Operand("norm_weight", BF16, (latent,)),
        Operand("cos", "float32", (None, config.rope_dim // 2), align=4),
        Operand("sin", "float32", (None, config.rope_dim // 2), align=4),
        Operand("slot_mapping", "int32", (None,), align=4),
        Operand("q_scale", "float32", (1,), align=4),
        Operand("kv_scale", "float32", (1,), align=4),
        Operand("kv_cache", config.kv_dtype, (None, None, config.row_width), wide=True),
        Operand("absorbed", config.q_dtype, (None, None, width), output=True),
        Operand(
            "new_kv_cache", config.kv_dtype, (None, None, config.row_width), output=True, wide=True, alias="kv_cache"
        ),
    )


FEW_TOKEN_QUERIES = Kernel(
    name="few_token_queries",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.queries:FewTokenQueries",
    config=QueriesConfig,
    operands=queries_operands,
    spec_from_options=few_token_queries_spec,
    reasons=queries_reasons,
    config_for=queries_config,
    presets=(),
)


def index_key_operands(config: IndexKeyConfig) -> tuple[Operand, ...]:
    """The operands. The numbers of tokens and of pages, and the page size, are read at the launch."""
    angles = (None, config.rope_dim // 2)
    return (
        Operand("keys", BF16, (None, None)),
        Operand("norm_weight", config.norm_dtype, (INDEXER.head_dim,)),
        Operand("norm_bias", config.norm_dtype, (INDEXER.head_dim,)),
        Operand("cos", "float32", angles),
        Operand("sin", "float32", angles),
        Operand("slot_mapping", "int32", (None,), align=4),
        Operand("k_cache", "uint8", (None, None, INDEXER.row_bytes), wide=True),
        Operand("new_k_cache", "uint8", (None, None, INDEXER.row_bytes), output=True, wide=True, alias="k_cache"),
    )


FEW_TOKEN_INDEX_KEY = Kernel(
    name="few_token_index_key",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.index_key:FewTokenIndexKey",
    config=IndexKeyConfig,
    operands=index_key_operands,
    spec_from_options=few_token_index_key_spec,
    reasons=index_key_reasons,
    config_for=index_key_config,
    presets=(),
)


def router_operands(config: RouterConfig) -> tuple[Operand, ...]:
    """The operands. All sizes are read at the launch."""
    return (
        Operand("x", BF16, (None, None)),
        Operand("router", "float32", (None, None)),
        *((Operand("norm_weight", BF16, (None,)),) if config.eps is not None else ()),
        Operand("logits", "float32", (None, None), output=True, align=4),
    )


FEW_TOKEN_ROUTER = Kernel(
    name="few_token_router",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.router:FewTokenRouter",
    config=RouterConfig,
    operands=router_operands,
    spec_from_options=few_token_router_spec,
    reasons=router_reasons,
    config_for=router_config,
    presets=(),
)


def choose_up_operands(config: ChoiceConfig) -> tuple[Operand, ...]:
    """The operands. All sizes but the numbers of experts and of choices are read at the launch."""
    return (
        Operand("x", BF16, (None, None)),
        Operand("weight", config.weight_dtype, (None, None, None)),
        *scales(config.narrow, None),
        *((Operand("norm_weight", BF16, (None,)),) if config.eps is not None else ()),
        Operand("logits", "float32", (None, config.num_experts), align=4),
        *((Operand("bias", "float32", (config.num_experts,), align=4),) if config.biased else ()),
        *((Operand("down", config.weight_dtype, (None, None, None)),) if config.ahead else ()),
        Operand("out", BF16, (None, None), output=True),
        Operand("experts", "int32", (None, config.choices), output=True, align=4),
        Operand("weights", "float32", (None, config.choices), output=True, align=4),
    )


FEW_TOKEN_CHOOSE_UP = Kernel(
    name="few_token_choose_up",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.launchers:choose_up",
    config=ChoiceConfig,
    operands=choose_up_operands,
    spec_from_options=few_token_choose_up_spec,
    reasons=choice_reasons,
    config_for=choice_config,
    presets=(),
)


def window_operands(config: WindowConfig) -> tuple[Operand, ...]:
    """The operands. The numbers of tokens and of pages, and the width of `joint`, are read at the launch."""
    cache = (None, V4_PACKED.page_bytes(config.page_size))
    angles = (None, V4_PACKED.rope_dim // 2)
    return (
        Operand("joint", BF16, (None, None)),
        Operand("low_norm_weight", "float32", (config.rank,)),
        Operand("norm_weight", "float32", (V4_PACKED.head_dim,)),
        Operand("cos", "float32", angles),
        Operand("sin", "float32", angles),
        Operand("slot_mapping", "int32", (None,), align=4),
        Operand("kv_cache", "uint8", cache, wide=True),
        Operand("low", BF16, (None, config.rank), output=True),
        Operand("new_kv_cache", "uint8", cache, output=True, wide=True, alias="kv_cache"),
    )


FEW_TOKEN_WINDOW = Kernel(
    name="few_token_window",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.window:FewTokenWindow",
    config=WindowConfig,
    operands=window_operands,
    spec_from_options=few_token_window_spec,
    reasons=window_reasons,
    config_for=window_config,
    presets=(),
)


def write_streams_operands(config: WriteStreamsConfig) -> tuple[Operand, ...]:
    """The operands. The numbers of tokens and of columns are read at the launch."""
    count = config.count
    weights = (
        Operand("write", "float32", (None, count), align=4),
        Operand("mix", "float32", (None, count * count), align=4),
    )
    return (
        Operand("streams", BF16, (None, None)),
        Operand("fn", "float32", (mix_rows(count, config.mixes), None)),
        *((Operand("out", BF16, (None, None)), *weights) if config.written else ()),
        Operand("sums", "float32", (None, None, SUMS), output=True),
        *((Operand("new_streams", BF16, (None, None), output=True),) if config.written else ()),
    )


FEW_TOKEN_WRITE_STREAMS = Kernel(
    name="few_token_write_streams",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.streams:FewTokenWriteStreams",
    config=WriteStreamsConfig,
    operands=write_streams_operands,
    spec_from_options=few_token_write_streams_spec,
    reasons=write_streams_reasons,
    config_for=write_streams_config,
    presets=(),
)


def read_streams_operands(config: ReadStreamsConfig) -> tuple[Operand, ...]:
    """The operands. The numbers of tokens, of columns and of partial sums are read at the launch."""
    count = config.count
    weights = (
        Operand("write", "float32", (None, count), output=True, align=4),
        Operand("mix", "float32", (None, count * count), output=True, align=4),
    )
    return (
        Operand("sums", "float32", (None, None, SUMS)),
        Operand("streams", BF16, (None, None)),
        Operand("base", "float32", (mix_rows(count, config.mixes),), align=4),
        Operand("scale", "float32", (3 if config.mixes else 1,), align=4),
        Operand("norm_weight", "float32", (None,)),
        Operand("read", BF16, (None, None), output=True),
        *(weights if config.mixes else ()),
    )


FEW_TOKEN_READ_STREAMS = Kernel(
    name="few_token_read_streams",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.streams:FewTokenReadStreams",
    config=ReadStreamsConfig,
    operands=read_streams_operands,
    spec_from_options=few_token_read_streams_spec,
    reasons=read_streams_reasons,
    config_for=read_streams_config,
    presets=(),
)


def inputs_operands(config: InputsConfig) -> tuple[Operand, ...]:
    """The operands. All sizes are read at the launch."""
    matrix = (None, None)
    return (
        Operand("x", BF16, matrix),
        Operand("weight", BF16, matrix),
        *(Operand(f"pooled_weight_{i}", BF16, matrix) for i in range(config.pooled)),
        Operand("out", BF16, matrix, output=True),
        *((Operand("tail", BF16, matrix, output=True),) if config.tail else ()),
        *(Operand(f"pooled_{i}", "float32", matrix, output=True) for i in range(config.pooled)),
    )


FEW_TOKEN_INPUTS = Kernel(
    name="few_token_inputs",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.inputs:FewTokenInputs",
    config=InputsConfig,
    operands=inputs_operands,
    spec_from_options=few_token_inputs_spec,
    reasons=inputs_reasons,
    config_for=inputs_config,
    presets=(),
)


def outputs_operands(config: OutputsConfig) -> tuple[Operand, ...]:
    """The operands. All sizes but D and R are read at the launch."""
    angles = (None, config.rope_dim // 2)
    return (
        Operand("heads", BF16, (None, None)),
        Operand("weight", BF16, (None, None, None)),
        Operand("cos", "float32", angles),
        Operand("sin", "float32", angles),
        Operand("out", BF16, (None, None), output=True),
    )


FEW_TOKEN_OUTPUTS = Kernel(
    name="few_token_outputs",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.outputs:FewTokenOutputs",
    config=OutputsConfig,
    operands=outputs_operands,
    spec_from_options=few_token_outputs_spec,
    reasons=outputs_reasons,
    config_for=outputs_config,
    presets=(),
)


def values_operands(config: ValuesConfig) -> tuple[Operand, ...]:
    """The operands. The numbers of heads, of slots and of rows are read at the launch."""
    return (
        Operand("latents", BF16, (None, LATENT)),
        Operand("partial_out", config.partial_dtype, (None, None, LATENT), wide=True),
        Operand("partial_lse", "float32", (None, 3, None), wide=True),
        Operand("split_info", "int32", (None, 4)),
        Operand("w_uv", BF16, (None, None, LATENT)),
        Operand("out", BF16, (None, None), output=True),
    )


FEW_TOKEN_VALUES = Kernel(
    name="few_token_values",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.few_tokens.values:FewTokenValues",
    config=ValuesConfig,
    operands=values_operands,
    spec_from_options=few_token_values_spec,
    reasons=values_reasons,
    config_for=values_config,
    presets=(),
)
