"""The shape of one DeepSeek-V4 attention layer, read from a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import jax

from tsmla_jax.nn.checkpoints.hf_config import hf_field, read_hf_config, rope_fields
from tsmla_jax.nn.checkpoints.known_fields import check_v4
from tsmla_jax.nn.yarn import YarnConfig, is_finite
from tsmla_kernels.contract.rules import static_int

Kind = Literal["sliding", "csa", "hca"]
_KINDS: dict[str, Kind] = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "sliding_window",
    "o_groups",
    "o_lora_rank",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
)
_RATIOS: dict[Kind, int] = {"sliding": 0, "csa": 4, "hca": 128}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class V4Config:
    """One V4 attention layer.

    Attributes:
        kind: "sliding" (window alone), "csa" (overlapping windows, an indexer chooses) or "hca" (all entries seen).
        ratio: tokens per compressed entry; 0 for "sliding".
        hidden_size: E.
        num_attention_heads: H.
        q_lora_rank: rank of the query's low-rank projection.
        head_dim: D.
        rope_dim: R, how many of a head's last columns are rotated.
        sliding_window: how many tokens a query sees uncompressed, its own included.
        o_groups: groups of the output projection; they must divide H.
        o_lora_rank: rank of one group of the output projection.
        index_n_heads: Hi, heads of a csa layer's indexer.
        index_head_dim: Di, width of an indexer's head.
        index_topk: how many entries the indexer of a csa layer chooses for a token, at most.
        rope_theta: base of this layer's rotary angles: the plain one in sliding layers, the compressor's in others.
        yarn: context extension of this layer's rope, or None.
        rms_norm_eps: epsilon of every norm.

    Raises:
        ValueError: a value is not legal.
    """

    kind: Kind
    ratio: int
    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    head_dim: int = 512
    rope_dim: int = 64
    sliding_window: int = 128
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    rope_theta: float = 10000.0
    yarn: YarnConfig | None = None
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.kind not in _RATIOS:
            raise ValueError(f"V4Config: kind: got {self.kind!r}; legal: {', '.join(_RATIOS)}")
        if type(self.ratio) is not int or (self.ratio == 0) != (self.kind == "sliding") or self.ratio < 0:
            legal = "0 for a sliding layer, above 0 for the others"
            raise ValueError(f"V4Config: ratio: got {self.ratio!r}; legal: {legal}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and field.name != "ratio" and (type(value) is not int or value <= 0):
                raise ValueError(f"V4Config: {field.name}: got {value!r}; legal: a positive integer")
        if self.rope_dim % 2 or self.rope_dim > min(self.head_dim, self.index_head_dim):
            raise ValueError(f"V4Config: rope_dim: got {self.rope_dim}; legal: even, up to head_dim and index_head_dim")
        if not (is_finite(self.rope_theta) and self.rope_theta > 1):
            raise ValueError(f"V4Config: rope_theta: got {self.rope_theta!r}; legal: a finite number above 1")
        if not (is_finite(self.rms_norm_eps) and self.rms_norm_eps >= 0):
            raise ValueError(f"V4Config: rms_norm_eps: got {self.rms_norm_eps!r}; legal: a finite number, at least 0")
        if self.num_attention_heads % self.o_groups:
            got, groups = self.num_attention_heads, self.o_groups
            raise ValueError(f"V4Config: num_attention_heads: got {got}; legal: a multiple of o_groups = {groups}")

    @property
    def overlap(self) -> bool:
        """Whether each row of a compressor holds two series, so that an entry pools 2 * ratio tokens and not ratio."""
        return self.kind == "csa"

    @property
    def compressors(self) -> tuple[tuple[str, int], ...]:
        """Name and channels of each compressor: a sliding layer has none, an hca layer one for latents, a csa layer
        also one for the indexer's keys.
        """
        both = (("compressor", self.head_dim), ("indexer", self.index_head_dim))
        return both[: {"sliding": 0, "hca": 1, "csa": 2}[self.kind]]

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path, layer: int) -> V4Config:
        """Layer `layer` of a Hugging Face config, as transformers writes it or as the checkpoints first had it.

        Args:
            source: the parsed config, or the path of a `config.json` or of the directory that holds it. Its model_type
                is deepseek_v4 or absent.
            layer: the layer's index, from 0.

        Raises:
            ValueError: a field is missing, not legal, or describes another layer than V4's (the message names it and,
                when `source` is a path, the file); or there is no such layer.
            TypeError: source is neither a mapping, a str nor a Path; or layer is no int.
        """
        fields, where = read_hf_config(source)
        layer = static_int("layer", layer)
        check_v4(fields, where)
        sizes = {name: hf_field(fields, name, int, where) for name in _SIZES}
        kind = _layer_kind(fields, where, layer)
        rope_dim = hf_field(fields, "qk_rope_head_dim", int, where, default=None)
        if rope_dim is None:
            factor = hf_field(fields, "partial_rotary_factor", float, where, default=64 / 512)
            rope_dim = _rotated(sizes["head_dim"], factor)
        _check_rope_dim(fields, where, sizes["head_dim"], rope_dim)
        rates = hf_field(fields, "compress_rates", dict, where, default={})
        legacy = {"csa": "compress_rate_csa", "hca": "compress_rate_hca"}
        ratio = 0
        if kind != "sliding":
            long_name = next(name for name, short in _KINDS.items() if short == kind)
            ratio = hf_field(rates, long_name, int, where, default=_RATIOS[kind])
            ratio = hf_field(fields, legacy[kind], int, where, default=ratio)
        own, owner = _layer_rope(fields, where, kind)
        _check_rope_dim(own, owner, sizes["head_dim"], rope_dim)
        own.pop("partial_rotary_factor", None)
        rope = rope_fields({"rope_parameters": own}, where)
        yarn = rope.yarn
        # The layers' cos and sin are not scaled, unless the config has an attention_factor.
        if yarn is not None and yarn.attention_factor is None:
            yarn = dataclasses.replace(yarn, attention_factor=1.0)
        eps = hf_field(fields, "rms_norm_eps", float, where, default=1e-6)
        try:
            return cls(
                kind=kind, ratio=ratio, rope_dim=rope_dim, rope_theta=rope.theta, yarn=yarn, rms_norm_eps=eps, **sizes
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _layer_kind(fields: Mapping[str, Any], where: str, layer: int) -> Kind:
    types, ratios = fields.get("layer_types"), fields.get("compress_ratios")
    if not isinstance(types, list) and not isinstance(ratios, list):
        got = f"{types!r:.60} and {ratios!r:.60}"
        raise ValueError(f"{where}: layer_types, compress_ratios: got {got}; legal: a list in at least one of them")
    name = "layer_types" if isinstance(types, list) else "compress_ratios"
    entries: list[Any] = types if isinstance(types, list) else cast(list[Any], ratios)
    if layer >= len(entries):
        raise ValueError(f"layer: got {layer}; legal: 0 to {len(entries) - 1}, the entries of {name!r} in {where}")
    known: dict[Any, Kind] = _KINDS if isinstance(types, list) else {ratio: kind for kind, ratio in _RATIOS.items()}
    if entries[layer] not in known:
        raise ValueError(
            f"{where}: field {name!r}: layer {layer} has type {entries[layer]!r}; legal: {', '.join(map(str, known))}"
        )
    return known[entries[layer]]


def _rotated(head_dim: int, factor: float) -> int:
    """How many columns of a head are rotated, as in transformers, but a product such as 100 * 0.58 is 58."""
    return int(head_dim * factor + 1e-6)


def _check_rope_dim(fields: Mapping[str, Any], where: str, head_dim: int, rope_dim: int) -> None:
    factor = hf_field(fields, "partial_rotary_factor", float, where, default=None)
    if factor is not None and _rotated(head_dim, factor) != rope_dim:
        legal = f"{rope_dim} / {head_dim}, the rotated part of head_dim"
        raise ValueError(f"{where}: partial_rotary_factor: got {factor}; legal: {legal}")


def _layer_rope(fields: Mapping[str, Any], where: str, kind: Kind) -> tuple[dict[str, Any], str]:
    """The rope fields of a layer, and how an error names them. If the config does not have them apart ("main" and
    "compress"), only layers with a compressor have an extended context.
    """
    old, new = (hf_field(fields, name, dict, where, default=None) for name in ("rope_scaling", "rope_parameters"))
    if old and new and old != new:
        raise ValueError(f"{where}: fields 'rope_scaling' and 'rope_parameters' disagree: {old!r:.80} and {new!r:.80}")
    parameters = old or new or {}
    if isinstance(parameters.get("main"), dict) and isinstance(parameters.get("compress"), dict):
        if others := {key for key, value in parameters.items() if value is not None} - {"main", "compress"}:
            raise ValueError(f"{where}: rope_parameters: got {min(others)!r}; legal: 'main' and 'compress'")
        label = "main" if kind == "sliding" else "compress"
        return dict(parameters[label]), f"{where}: rope_parameters.{label}"
    own = {} if kind == "sliding" else dict(parameters)
    name, default = ("rope_theta", 10000.0) if kind == "sliding" else ("compress_rope_theta", 160000.0)
    own["rope_theta"] = hf_field(fields, name, float, where, default=default)
    return own, f"{where}: rope_parameters"
