"""The kernels there are: how each is made and which arrays it takes. Imports no cutlass, jax or torch.

A kernel is a class whose instances are `@cute.jit` launchers, built from a frozen config. This module says where that
class is, and which operands the launcher takes in which order for a config; compile.py, cache.py and both front ends
need nothing else about it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from tsmla_kernels import contract
from tsmla_kernels.cache_ops import config as cache_config
from tsmla_kernels.contract import cache as cache_contract
from tsmla_kernels.merge import config as merge_rules
from tsmla_kernels.sm90.decode import config as sm90_decode
from tsmla_kernels.sm90.indexer import config as sm90_indexer
from tsmla_kernels.sm90.prefill import config as sm90_prefill
from tsmla_kernels.sm100 import config as sm100

Config = Any  # a frozen dataclass of ints, bools and strings; each kernel has its own

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Operand:
    """One array of a kernel's launcher, row-major and dense.

    Attributes:
      name: the launcher's parameter.
      dtype: the dtype's name, a key of ITEMSIZE.
      shape: the sizes compiled in, None where the size is read from the array at the launch.
      output: whether the kernel writes it; outputs follow the inputs.
      wide: keep the first axis' stride a 64-bit run-time value, although it may be known: a product of a page number
        and a static stride is computed in 32 bits and wraps beyond 2^31 elements.
      align: bytes that the array's address is a multiple of.
      alias: the input whose memory this output is: it is written in place.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    output: bool = False
    wide: bool = False
    align: int = 16
    alias: str | None = None

    def check(self, shape: tuple[Any, ...], dtype: str) -> None:
        """ValueError unless an array of this shape and dtype may be passed; symbolic sizes pass for dynamic ones."""
        fits = len(shape) == len(self.shape) and all(
            want is None or want == got for want, got in zip(self.shape, shape, strict=True)
        )
        if not fits or dtype != self.dtype:
            legal = ", ".join("any" if size is None else str(size) for size in self.shape)
            got = ", ".join(map(str, shape))
            raise ValueError(f"{self.name}: got {dtype}[{got}]; the kernel takes {self.dtype}[{legal}]")


@dataclass(frozen=True)
class Package:
    """Another package, of whose code kernels are made.

    Attributes:
      module: what it is imported as. distribution: what it is installed as, and `install` how.
      checked: the version that the kernels were checked with, taken for that of objects where it isn't installed.
    """

    module: str
    distribution: str
    install: str
    checked: str

    @property
    def version(self) -> str:
        """That which is installed, found without importing it, else `checked`."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return self.checked


@dataclass(frozen=True)
class Kernel:
    """How one kernel is made.

    Attributes:
      name: unique among all kernels of all architectures.
      archs: the architectures it can be compiled for, as in CUTE_DSL_ARCH.
      launcher: "module:name"; name(config), a class or a function, is the `@cute.jit` callable (stream, *operands).
      config: the config's dataclass.
      operands: the launcher's operands for a config.
      from_options: the config that options of the command line name; ValueError says what is wrong with them.
      presets: options by the name of a model.
      compiler_options: of the DSL, beside those that every kernel is compiled with.
      package: whose code its objects hold, if not this one's.
    """

    name: str
    archs: tuple[str, ...]
    launcher: str
    config: type
    operands: Callable[[Any], tuple[Operand, ...]]
    from_options: Callable[[Mapping[str, str]], Config] | None = None
    presets: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    compiler_options: str = ""
    package: Package | None = None

    def config_json(self, config: Config) -> str:
        """The config as a line of JSON, the same for equal configs."""
        return json.dumps(dataclasses.asdict(config), sort_keys=True)

    def config_from_json(self, line: str) -> Config:
        """The inverse of `config_json`."""
        return self.config(**json.loads(line))


def mla_decode_operands(config: sm90_decode.DecodeConfig) -> tuple[Operand, ...]:
    """N = T * H query rows; `parts` and `slots` as in choose.workspace_shapes."""
    head_dim = config.latent_dim + config.rope_dim
    # The workspaces' static sizes don't depend on the number of multiprocessors, the batch or the table.
    workspaces = sm90_decode.workspace_shapes(config, 1, 1, 1)
    return (
        Operand("q", config.dtype, (None, head_dim)),
        Operand("kv_cache", config.cache_dtype, (None, config.page_size, head_dim), wide=True),
        Operand("block_tables", "int32", (None, None), align=4),
        Operand("seq_lens", "int32", (None,), align=4),
        Operand("cu_seqlens_q", "int32", (None,), align=4),
        Operand("scales", "float32", (2,), align=4),
        Operand("out", config.out_dtype, (None, config.latent_dim), output=True),
        Operand("lse", "float32", (None,), output=True, align=4),  # XLA may have it written into the middle of another
        *(
            Operand(name, dtype, (None, *shape[1:]), output=True, wide=True)
            for name, (shape, dtype) in workspaces.items()
        ),
    )


DECODE_PRESETS = (
    ("deepseek-v2", (("num_heads", "128"),)),
    ("deepseek-v2-lite", (("num_heads", "16"),)),
    ("deepseek-v3", (("num_heads", "128"),)),
    ("kimi-k2", (("num_heads", "64"),)),
)
"""Query heads of public models, all with L = 512 and R = 64; tensor_parallel divides them."""

_DECODE_DEFAULTS = {
    "tensor_parallel": "1",
    "dtype": "bfloat16",
    "max_q_len": "1",
    "latent_dim": "512",
    "rope_dim": "64",
    "page_size": "64",
    "ragged": "false",
    "causal": "true",
    "batch_invariant": "false",
}


def mla_decode_config(options: Mapping[str, str]) -> sm90_decode.DecodeConfig:
    """The config that a call with these options is given by choose.decode_config: one way to it, so that what is
    compiled ahead is what runs. `options` are a DecodeSpec's static fields, as text, and tensor_parallel, the number
    of devices that share the heads. ValueError names the option."""
    spec = _decode_spec(options)
    if reasons := sm90_decode.decode_reasons(spec):
        raise ValueError(f"--config: no kernel for it: {'; '.join(reasons)}")
    return sm90_decode.decode_config(spec)


def _filled_in(options: Mapping[str, str], defaults: Mapping[str, str], others: Set[str]) -> dict[str, str]:
    """The options with what they leave out. ValueError unless each has a default or is one of `others`."""
    values = {**defaults, **options}
    known = {*defaults, *others}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"--config: got option {unknown[0]!r}; legal: {', '.join(sorted(known))}")
    return values


def _decode_spec(options: Mapping[str, str]) -> contract.DecodeSpec:
    values = _filled_in(options, _DECODE_DEFAULTS, {"num_heads", "kv_dtype"})
    if "num_heads" not in values:
        raise ValueError("--config: num_heads is needed, or a preset that has it")
    latent_dim, rope_dim = _integer(values, "latent_dim"), _integer(values, "rope_dim")
    max_q_len, heads, devices = (_integer(values, name) for name in ("max_q_len", "num_heads", "tensor_parallel"))
    if heads % devices:
        raise ValueError(f"--config: got tensor_parallel={devices}; it must divide num_heads={heads}")
    return contract.DecodeSpec(
        batch=1,
        total_q_len=max_q_len,
        max_q_len=max_q_len,
        num_heads=heads // devices,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        head_dim=latent_dim + rope_dim,
        num_pages=1,
        page_size=_integer(values, "page_size"),
        max_pages=1,
        q_dtype=values["dtype"],
        kv_dtype=values.get("kv_dtype", values["dtype"]),
        out_dtype=contract.attention_out_dtype(values["dtype"]),
        lse_dtype="float32",
        ragged=_boolean(values, "ragged"),
        causal=_boolean(values, "causal"),
        return_lse=True,
        batch_invariant=_boolean(values, "batch_invariant"),
    )


MLA_DECODE = Kernel(
    name="mla_decode",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.decode.launchers:mla_decode",
    config=sm90_decode.DecodeConfig,
    operands=mla_decode_operands,
    from_options=mla_decode_config,
    presets=DECODE_PRESETS,
)


def mla_prefill_operands(config: sm90_prefill.PrefillConfig) -> tuple[Operand, ...]:
    """q, k and v as mla_prefill takes them, or kv and k_rope as mla_prefill_kv does; the number of heads is read at the
    launch."""
    workspaces = sm90_prefill.prefill_workspaces(1, 1)
    k_dim, v_dim, rope_dim = config.qk_head_dim, config.v_head_dim, config.rope_dim
    keys = (Operand("k", config.dtype, (None, None, k_dim)), Operand("v", config.dtype, (None, None, v_dim)))
    if rope_dim:
        kv = Operand("kv", config.dtype, (None, None, k_dim - rope_dim + v_dim))
        keys = (kv, Operand("k_rope", config.dtype, (None, rope_dim)))
    return (
        Operand("q", config.dtype, (None, None, k_dim)),
        *keys,
        Operand("cu_seqlens_q", "int32", (None,), align=4),
        Operand("cu_seqlens_kv", "int32", (None,), align=4),
        Operand("scales", "float32", (2,), align=4),
        Operand("out", contract.attention_out_dtype(config.dtype), (None, None, v_dim), output=True),
        Operand("lse", "float32", (None, None), output=True, align=4),
        *(Operand(name, dtype, (None, *shape[1:]), output=True) for name, (shape, dtype) in workspaces.items()),
    )


_PREFILL_DEFAULTS = {
    "dtype": "bfloat16",
    "qk_head_dim": "192",
    "v_head_dim": "128",
    "causal": "true",
    "shared_rope": "false",
}


def mla_prefill_config(options: Mapping[str, str]) -> sm90_prefill.PrefillConfig:
    """As mla_decode_config, for choose_prefill.prefill_config; shared_rope=true is for mla_prefill_kv. The options that
    only decode has make no difference here: a model's preset names both kernels."""
    values, spec = _prefill_spec(options)
    rope_dim = 64 if _boolean(values, "shared_rope") else 0
    reasons = sm90_prefill.prefill_reasons(spec)
    if rope_dim:
        reasons += sm90_prefill.shared_rope_reasons(spec, rope_dim)
    if reasons:
        raise ValueError(f"--config: no kernel for it: {'; '.join(reasons)}")
    return sm90_prefill.prefill_config(spec, rope_dim)


def _prefill_spec(options: Mapping[str, str]) -> tuple[dict[str, str], contract.PrefillSpec]:
    """The options with what they leave out, and the spec that they say."""
    values = _filled_in(options, _PREFILL_DEFAULTS, {*_DECODE_DEFAULTS, "num_heads"})
    return values, contract.PrefillSpec(
        batch=1,
        total_q_len=1,
        total_kv_len=1,
        max_q_len=1,
        max_kv_len=1,
        num_heads=1,
        qk_head_dim=_integer(values, "qk_head_dim"),
        v_head_dim=_integer(values, "v_head_dim"),
        q_dtype=values["dtype"],
        kv_dtype=values["dtype"],
        out_dtype=contract.attention_out_dtype(values["dtype"]),
        lse_dtype="float32",
        causal=_boolean(values, "causal"),
        return_lse=True,
    )


MLA_PREFILL = Kernel(
    name="mla_prefill",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.prefill.mla_prefill:MlaPrefill",
    config=sm90_prefill.PrefillConfig,
    operands=mla_prefill_operands,
    from_options=mla_prefill_config,
    presets=DECODE_PRESETS,
)


# ---- Blackwell: TokenSpeed's kernels


def sm100_decode_operands(config: sm100.DecodeConfig) -> tuple[Operand, ...]:
    """S and H are read at the launch, although they are known: the package's host code computes with them there."""
    head_dim = sm100.LATENT_DIM + sm100.ROPE_DIM
    return (
        Operand("q", config.dtype, (None, None, None, head_dim), wide=True),
        Operand("kv_cache", config.dtype, (None, config.page_size, head_dim), wide=True),
        Operand("block_tables", "int32", (None, None), align=4),
        Operand("seq_lens", "int32", (None,), align=4),
        Operand("visible_lens", "int32", (None, None), align=4),
        *_sm100_outputs(
            config.traced_scales,
            Operand(
                "out", contract.attention_out_dtype(config.dtype), (None, None, None, sm100.LATENT_DIM), output=True
            ),
            Operand("lse", "float32", (None, None, None), output=True, align=4),
            Operand("workspace", "int8", (None, None), output=True, align=32),
        ),
    )


def sm100_prefill_operands(config: sm100.PrefillConfig) -> tuple[Operand, ...]:
    """Everything is packed, as mla_prefill takes it."""
    return (
        Operand("q", config.dtype, (None, None, sm100.QK_HEAD_DIM)),
        Operand("k", config.dtype, (None, None, sm100.QK_HEAD_DIM)),
        Operand("v", config.dtype, (None, None, sm100.V_HEAD_DIM)),
        Operand("cu_seqlens_q", "int32", (None,), align=4),
        Operand("cu_seqlens_kv", "int32", (None,), align=4),
        *_sm100_outputs(
            config.traced_scales,
            Operand("out", contract.attention_out_dtype(config.dtype), (None, None, sm100.V_HEAD_DIM), output=True),
            Operand("lse", "float32", (None, None), output=True, align=4),
            Operand("longest_q", "int8", (None,), output=True, align=1),
        ),
    )


def _sm100_outputs(traced_scales: bool, *outputs: Operand) -> tuple[Operand, ...]:
    """The outputs, after the scales where these are an array, else before the operands whose sizes say them."""
    if traced_scales:
        return (Operand("scales", "float32", (2,), align=4), *outputs)
    return (*outputs, *(Operand(name, "int8", (None,), output=True, align=1) for name in sm100.SCALE_OPERANDS))


def sm100_decode_config(options: Mapping[str, str]) -> sm100.DecodeConfig:
    """As mla_decode_config; traced_scales=true is for calls whose scales are computed on the device."""
    options, traced = _without_traced_scales(options)
    spec = _decode_spec(options)
    if reasons := sm100.decode_reasons(spec):
        raise ValueError(f"--config: no kernel for it: {'; '.join(reasons)}")
    return sm100.decode_config(spec, traced_scales=traced)


def sm100_prefill_config(options: Mapping[str, str]) -> sm100.PrefillConfig:
    """As mla_prefill_config, with traced_scales as for decode."""
    options, traced = _without_traced_scales(options)
    _, spec = _prefill_spec(options)
    if reasons := sm100.prefill_reasons(spec):
        raise ValueError(f"--config: no kernel for it: {'; '.join(reasons)}")
    return sm100.prefill_config(spec, traced_scales=traced)


def _without_traced_scales(options: Mapping[str, str]) -> tuple[dict[str, str], bool]:
    others = {name: value for name, value in options.items() if name != "traced_scales"}
    return others, _boolean({"traced_scales": "false", **options}, "traced_scales")


TOKENSPEED = Package("tokenspeed_mla", "tokenspeed-mla", sm100.INSTALL, sm100.CHECKED_VERSION)

MLA_DECODE_SM100 = Kernel(
    name="mla_decode_sm100",
    archs=sm100.ARCHS,
    launcher="tsmla_kernels.sm100.mla_decode:MlaDecode",
    config=sm100.DecodeConfig,
    operands=sm100_decode_operands,
    from_options=sm100_decode_config,
    presets=DECODE_PRESETS,
    compiler_options=sm100.COMPILER_OPTIONS,
    package=TOKENSPEED,
)

MLA_PREFILL_SM100 = Kernel(
    name="mla_prefill_sm100",
    archs=sm100.ARCHS,
    launcher="tsmla_kernels.sm100.mla_prefill:MlaPrefill",
    config=sm100.PrefillConfig,
    operands=sm100_prefill_operands,
    from_options=sm100_prefill_config,
    presets=DECODE_PRESETS,
    compiler_options=sm100.COMPILER_OPTIONS,
    package=TOKENSPEED,
)


# ---- the cache's own kernels, of any architecture


def cache_write_operands(config: cache_config.WriteConfig) -> tuple[Operand, ...]:
    """latent and k_rope may be wider than L and R: their first columns are what is read."""
    return (
        Operand("kv_cache", config.kv_dtype, (None, None, config.head_dim), wide=True),
        Operand("latent", config.in_dtype, (None, None)),
        Operand("k_rope", config.in_dtype, (None, None)),
        Operand("slot_mapping", "int32", (None,), align=4),
        Operand("kv_scale", "float32", (1,), align=4),
        Operand("new_kv_cache", config.kv_dtype, (None, None, config.head_dim), True, wide=True, alias="kv_cache"),
    )


def rope_write_operands(config: cache_config.RopeWriteConfig) -> tuple[Operand, ...]:
    """N = T * H query rows. Rows of the inputs, cos and sin may be wider than L, R and R / 2, as those of
    cache_write_operands."""
    return (
        Operand("kv_cache", config.kv_dtype, (None, None, config.head_dim), wide=True),
        *(Operand(name, config.in_dtype, (None, None)) for name in ("q_nope", "q_rope", "latent", "k_rope")),
        Operand("slot_mapping", "int32", (None,), align=4),
        Operand("cos", "float32", (None, None)),
        Operand("sin", "float32", (None, None)),
        Operand("q_scale", "float32", (1,), align=4),
        Operand("kv_scale", "float32", (1,), align=4),
        Operand("q", config.q_dtype, (None, config.head_dim), output=True),
        Operand("new_kv_cache", config.kv_dtype, (None, None, config.head_dim), True, wide=True, alias="kv_cache"),
    )


def cache_gather_operands(config: cache_config.GatherConfig) -> tuple[Operand, ...]:
    """Operands of gather_kv_cache, as its contract has them."""
    return (
        Operand("kv_cache", config.kv_dtype, (None, None, config.head_dim), wide=True),
        Operand("block_tables", "int32", (None, None), align=4),
        Operand("starts", "int32", (None,), align=4),
        Operand("lens", "int32", (None,), align=4),
        Operand("kv_scale", "float32", (1,), align=4),
        Operand("out", config.out_dtype, (None, config.head_dim), output=True),
    )


_CACHE_DEFAULTS = {
    "dtype": "bfloat16",
    "latent_dim": "512",
    "rope_dim": "64",
    "rope_interleave": "true",
    "rope_layout": "interleaved",
}


_ATTENTION_OPTIONS = {*_DECODE_DEFAULTS, *_PREFILL_DEFAULTS, "num_heads", "kv_dtype"}


def cache_write_config(options: Mapping[str, str]) -> cache_config.WriteConfig:
    """As mla_decode_config, for cache_config.write_config: `dtype` is that of the cache or, beside a kv_dtype, of what
    is written; an fp8 cache alone is written from bfloat16. The options that only other kernels have make no difference
    here: a model's preset names them all."""
    _, spec = _cache_specs(options)
    return _chosen(cache_config.write_reasons(spec.write), cache_config.write_config(spec.write))


def rope_write_config(options: Mapping[str, str]) -> cache_config.RopeWriteConfig:
    """As cache_write_config; `dtype` is also that of the query."""
    _, spec = _cache_specs(options)
    return _chosen(cache_config.rope_write_reasons(spec), cache_config.rope_write_config(spec))


def cache_gather_config(options: Mapping[str, str]) -> cache_config.GatherConfig:
    """As cache_write_config; rows come out as they would be written from."""
    spec, _ = _cache_specs(options)
    return _chosen(cache_config.gather_reasons(spec), cache_config.gather_config(spec))


def _cache_specs(options: Mapping[str, str]) -> tuple[contract.CacheGatherSpec, cache_contract.RopeWriteSpec]:
    values = _filled_in(options, _CACHE_DEFAULTS, _ATTENTION_OPTIONS)
    if values["rope_layout"] not in cache_contract.ROPE_LAYOUTS:
        legal = " or ".join(cache_contract.ROPE_LAYOUTS)
        raise ValueError(f"--config: got rope_layout={values['rope_layout']}; legal: {legal}")
    latent_dim, rope_dim = _integer(values, "latent_dim"), _integer(values, "rope_dim")
    kv_dtype = values.get("kv_dtype", values["dtype"])
    in_dtype = contract.attention_out_dtype(values["dtype"])
    write = contract.CacheWriteSpec(1, latent_dim, rope_dim, latent_dim + rope_dim, 1, 1, in_dtype, kv_dtype)
    return (
        contract.CacheGatherSpec(1, 1, latent_dim + rope_dim, 1, 1, 1, kv_dtype, in_dtype),
        cache_contract.RopeWriteSpec(
            write, 1, values["dtype"], _boolean(values, "rope_interleave"), values["rope_layout"]
        ),
    )


def _chosen(reasons: list[str], config: Config) -> Config:
    if reasons:
        raise ValueError(f"--config: no kernel for it: {'; '.join(reasons)}")
    return config


WRITE_KV_CACHE = Kernel(
    name="write_kv_cache",
    archs=cache_config.ARCHS,
    launcher="tsmla_kernels.cache_ops.kernels:WriteKvCache",
    config=cache_config.WriteConfig,
    operands=cache_write_operands,
    from_options=cache_write_config,
    presets=DECODE_PRESETS,
)

ROPE_WRITE_KV_CACHE = Kernel(
    name="rope_write_kv_cache",
    archs=cache_config.ARCHS,
    launcher="tsmla_kernels.cache_ops.kernels:RopeWriteKvCache",
    config=cache_config.RopeWriteConfig,
    operands=rope_write_operands,
    from_options=rope_write_config,
    presets=DECODE_PRESETS,
)

GATHER_KV_CACHE = Kernel(
    name="gather_kv_cache",
    archs=cache_config.ARCHS,
    launcher="tsmla_kernels.cache_ops.kernels:GatherKvCache",
    config=cache_config.GatherConfig,
    operands=cache_gather_operands,
    from_options=cache_gather_config,
    presets=DECODE_PRESETS,
)

# ---- merging partial results, of any architecture


def merge_operands(config: merge_rules.MergeConfig) -> tuple[Operand, ...]:
    """The parts' rows may be wider than L: their first columns are what is read. The first part's memory is the
    result's, where its owner has no further use for it."""
    parts = range(config.parts)
    return (
        *(Operand(f"out_{i}", config.dtype, (None, None)) for i in parts),
        *(Operand(f"lse_{i}", "float32", (None,), align=4) for i in parts),
        Operand("out", config.dtype, (None, config.head_dim), True, alias="out_0"),
        Operand("lse", "float32", (None,), True, align=4, alias="lse_0"),
    )


_MERGE_DEFAULTS = {"dtype": "bfloat16", "v_head_dim": "128", "parts": "2"}


def merge_config(options: Mapping[str, str]) -> merge_rules.MergeConfig:
    """As mla_prefill_config, for merge_rules.merge_config: `dtype` is that of attention whose results are merged, and
    v_head_dim their width."""
    values = _filled_in(options, _MERGE_DEFAULTS, {*_CACHE_DEFAULTS, *_ATTENTION_OPTIONS})
    spec = contract.MergeSpec(
        num_parts=_integer(values, "parts"),
        rows=(1,),
        head_dim=_integer(values, "v_head_dim"),
        out_dtype=contract.attention_out_dtype(values["dtype"]),
        lse_dtype="float32",
    )
    return _chosen(merge_rules.merge_reasons(spec), merge_rules.merge_config(spec))


MERGE_ATTENTION_STATES = Kernel(
    name="merge_attention_states",
    archs=cache_config.ARCHS,
    launcher="tsmla_kernels.merge.kernel:MergeAttentionStates",
    config=merge_rules.MergeConfig,
    operands=merge_operands,
    from_options=merge_config,
    presets=DECODE_PRESETS,
)

# ---- the indexer's


def topk_operands(config: sm90_indexer.TopkConfig) -> tuple[Operand, ...]:
    """Rows of logits may begin at any multiple of 4 bytes; the array itself begins at one of 16."""
    starts = (Operand("row_starts", "int32", (None,), align=4),) if config.row_starts else ()
    tables = (Operand("block_tables", "int32", (None, None), align=4),) if config.page_size else ()
    counts = (Operand("counts", "int32", (None,), output=True, align=4),) if config.page_size else ()
    return (
        Operand("logits", "float32", (None, None), wide=True),
        Operand("seq_lens", "int32", (None,), align=4),
        *starts,
        *tables,
        Operand("indices", "int32", (None, config.k), output=True, align=4),
        *counts,
    )


SELECT_TOPK = Kernel(
    name="select_topk",
    archs=("sm_90a",),
    launcher="tsmla_kernels.sm90.indexer.topk:SelectTopk",
    config=sm90_indexer.TopkConfig,
    operands=topk_operands,
)

KERNELS = {
    kernel.name: kernel
    for kernel in (
        MLA_DECODE,
        MLA_PREFILL,
        MLA_DECODE_SM100,
        MLA_PREFILL_SM100,
        WRITE_KV_CACHE,
        ROPE_WRITE_KV_CACHE,
        GATHER_KV_CACHE,
        MERGE_ATTENTION_STATES,
        SELECT_TOPK,
    )
}


def _integer(values: Mapping[str, str], name: str) -> int:
    minimum = 0 if name == "rope_dim" else 1
    if not values[name].isdecimal() or int(values[name]) < minimum:
        raise ValueError(f"--config: got {name}={values[name]}; legal: an int >= {minimum}")
    return int(values[name])


def _boolean(values: Mapping[str, str], name: str) -> bool:
    if values[name] not in ("true", "false"):
        raise ValueError(f"--config: got {name}={values[name]}; legal: true or false")
    return values[name] == "true"
