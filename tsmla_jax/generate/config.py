"""The configuration of a whole decoder, DeepSeek's or one like it, read from a Hugging Face `config.json`.

`tsmla_jax.nn` describes the attention (`MLAConfig`, `V32Config`, `V4Config`); this adds the rest of the model: sizes,
the experts' routing, the residual streams of V4 and the token ids that end a text.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tsmla_jax.generate.model_types import (
    DEFAULT_ROUTING,
    DEFAULTS,
    LONGCAT,
    TEXT_AND_IMAGES,
    Routing,
    check_fields,
    default_of,
    longcat_fields,
    text_fields,
)
from tsmla_jax.nn import MLAConfig, V4Config, V32Config
from tsmla_jax.nn.checkpoints.hf_config import hf_field, read_hf_config, read_optional_config
from tsmla_jax.nn.checkpoints.known_fields import SHARING_TYPES, V32_TYPES, check_values
from tsmla_jax.nn.v32.config import layers_with_indexer

ROUTINGS: tuple[Routing, ...] = ("greedy", "group_limited_greedy", "noaux_tc")
Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
MLPKind = Literal["dense", "moe", "hash_moe", "shortcut"]
LayerAttention = MLAConfig | V32Config | V4Config

MAX_SIZE = 2**31 - 1
"""Greatest vocabulary, width and length in a `config.json`, as indices, lengths and slots are int32."""
MAX_LAYERS = 10_000
"""Most layers: some hundred times those of any model. A config has an entry for each of them."""

_SCORING: dict[Routing, Scoring] = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}
_MLP_KINDS: dict[str, MLPKind] = {"dense": "dense", "sparse": "moe", "moe": "moe", "hash_moe": "hash_moe"}


@dataclass(frozen=True)
class MoEConfig:
    """Sizes and routing of the mixture-of-experts layers.

    Attributes:
      num_experts: routed experts E, without the num_zero that return their input.
      top_k: experts K that are chosen for each token.
      intermediate_size: width of one routed expert.
      num_shared: shared experts, in a checkpoint one MLP of width num_shared * intermediate_size; 0 for none.
      routing: "greedy" (top-k), "group_limited_greedy" (top-k within the topk_group groups with the best single expert)
        or "noaux_tc" (score + correction bias selects, groups by their best two).
      n_group: number of expert groups; "greedy" ignores groups.
      topk_group: how many of them a token may use.
      norm_topk_prob: whether the chosen weights are divided by their sum.
      routed_scaling_factor: multiplies the chosen weights, after the division.
      scoring: the function that makes scores of logits: "softmax", "sigmoid" or "sqrtsoftplus"; None is the routing's
        own, sigmoid for noaux_tc and softmax for the others.
      swiglu_limit: the experts' gate is clipped to at most this, and their other factor to at most this in magnitude;
        None clips nothing.
      num_zero: experts without weights, after the routed ones: each returns its input (LongCat-Flash).

    Raises:
      ValueError: a value is not legal; the error names the field of `config.json`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared: int
    routing: Routing
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring: Scoring | None = None
    swiglu_limit: float | None = None
    num_zero: int = 0

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise ValueError(f"topk_method = {self.routing!r}; legal: {', '.join(ROUTINGS)}")
        if self.scoring is None:
            object.__setattr__(self, "scoring", _SCORING[self.routing])
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring_func = {self.scoring!r}; legal: {', '.join(SCORINGS)}, or None")
        if self.swiglu_limit is not None and not self.swiglu_limit > 0:
            raise ValueError(f"swiglu_limit = {self.swiglu_limit}; legal: a positive number, or None")
        if self.intermediate_size < 1:
            raise ValueError(f"moe_intermediate_size = {self.intermediate_size}; legal: at least 1")
        if self.num_shared < 0:
            raise ValueError(f"n_shared_experts = {self.num_shared}; legal: at least 0")
        if not math.isfinite(self.routed_scaling_factor):
            raise ValueError(f"routed_scaling_factor = {self.routed_scaling_factor}; legal: a finite number")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"num_experts_per_tok = {self.top_k}; legal: 1 to n_routed_experts = {self.num_experts}")
        if self.routing != "greedy":
            if self.n_group < 1 or self.num_experts % self.n_group:
                raise ValueError(f"n_group = {self.n_group}; legal: a divisor of n_routed_experts = {self.num_experts}")
            if not 1 <= self.topk_group <= self.n_group:
                raise ValueError(f"topk_group = {self.topk_group}; legal: 1 to n_group = {self.n_group}")
            if self.top_k > self.topk_group * (self.num_experts // self.n_group):
                raise ValueError(
                    f"num_experts_per_tok = {self.top_k}; legal: at most the experts of topk_group = "
                    f"{self.topk_group} groups, with {self.num_experts // self.n_group} each"
                )
            if self.routing == "noaux_tc" and self.n_group > 1 and self.num_experts // self.n_group < 2:
                raise ValueError(f"n_group = {self.n_group}; legal for noaux_tc: groups of at least two experts")
        if self.num_zero < 0 or (self.num_zero and (self.num_shared or self.n_group > 1)):
            raise ValueError(
                f"zero_expert_num = {self.num_zero}; legal: at least 0, and 0 with shared experts or several groups"
            )

    @property
    def choice(self) -> MoEConfig:
        """This routing among all experts that a token can choose, those without weights included."""
        return replace(self, num_experts=self.num_experts + self.num_zero, num_zero=0) if self.num_zero else self


@dataclass(frozen=True)
class StreamsConfig:
    """V4's residual: several parallel streams, mixed anew before and after every block (hyper-connections).

    Attributes:
      count: number of streams N.
      sinkhorn_iterations: rounds that make the mixing matrix doubly stochastic.
      eps: added to the divisors of these rounds, to the mixing matrix before them, and to the weights of reading.
      norm_eps: the epsilon of the weightless norm before the projection that gives the weights of a mix.
    """

    count: int
    sinkhorn_iterations: int
    eps: float
    norm_eps: float

    def __post_init__(self) -> None:
        for name, value in (("hc_mult", self.count), ("hc_sinkhorn_iters", self.sinkhorn_iterations)):
            if value < 1:
                raise ValueError(f"{name} = {value}; legal: at least 1")
        _check_eps("hc_eps", self.eps)
        _check_eps("rms_norm_eps", self.norm_eps)


def _check_eps(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} = {value}; legal: a finite number, at least 0")


@dataclass(frozen=True)
class LayerConfig:
    """The config of one decoder layer's program; layers of equal configs and parameter shapes share a program.

    Attributes:
        attention: the config of this layer's own attention.
        shared_behind: whether the next layer attends to the keys that this one chose or was given.
        The others are as in `ModelConfig`.
    """

    attention: LayerAttention
    moe: MoEConfig | None
    streams: StreamsConfig | None
    rms_norm_eps: float
    shared_behind: bool = False

    @property
    def kind(self) -> str:
        """V4's kind of layer ("sliding", "csa" or "hca"); empty for other models."""
        return self.attention.kind if isinstance(self.attention, V4Config) else ""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only DeepSeek-V2, V3, V3.2 or V4 model, or one of the other models that model_types.py names.

    Attributes:
      attention: one config for all layers, or in V4 one for each layer.
      moe: the experts, or None for a model without experts.
      streams: V4's residual streams, or None for a plain residual.
      mlp_layers: for every layer "dense", "moe" (a router chooses the experts), "hash_moe" (a table by token id does)
        or "shortcut" (a dense MLP, and a mixture of experts beside it whose result is added after the next layer).
      vocab_size: how many tokens the vocabulary has.
      hidden_size: width of the residual stream.
      intermediate_size: width of a dense layer's MLP; in V4, which has none, width of one expert.
      num_layers: decoder layers, without those of multi-token prediction; LongCat-Flash's, which have two attentions
        and two MLPs, count twice.
      rms_norm_eps: the epsilon of the layers' norms and of the final norm (`attention` has that of its own norms).
      tie_word_embeddings: whether the output projection is the embedding.
      max_position_embeddings: the longest text the model was made for, in tokens.
      eos_token_ids: tokens that end a text; may be empty.
      dtype: the name of the checkpoint's own compute dtype ("bfloat16", "float16" or "float32").
      indexer_layers: whether each layer has an indexer, where some share the choice of a layer before them (GLM-5.2 and
        5.3); empty where all layers are alike.
    """

    attention: MLAConfig | V32Config | tuple[V4Config, ...]
    moe: MoEConfig | None
    streams: StreamsConfig | None
    mlp_layers: tuple[MLPKind, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    indexer_layers: tuple[bool, ...] = ()

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer` (counted from 0) has experts."""
        return self.mlp_layers[layer] != "dense"

    def layer(self, layer: int) -> LayerConfig:
        """The config of layer `layer` (counted from 0)."""
        attention = self.attention[layer] if isinstance(self.attention, tuple) else self.attention
        shared_behind = False
        if self.indexer_layers and isinstance(attention, V32Config):
            attention = replace(attention, has_indexer=self.indexer_layers[layer])
            shared_behind = layer + 1 < self.num_layers and not self.indexer_layers[layer + 1]
        return LayerConfig(attention, self.moe, self.streams, self.rms_norm_eps, shared_behind)

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> ModelConfig:
        """Reads a `config.json` of a model that docs/guides/generate.md lists.

        Args:
          source: the parsed file, its path, or the checkpoint directory. The end-of-text ids are those of the
            directory's `generation_config.json`, if it has the field (null means no ids). docs/guides/generate.md says
            which fields may be absent.

        Raises:
          ValueError: there is no such file, or it is no JSON object; a field is missing, has an illegal value, or
            describes arithmetic that the model doesn't have (a multiplier, a gate, shared indices, a key of rope). The
            error names the field.
          TypeError: `source` is neither a mapping nor a path.
        """
        fields, where = read_hf_config(source)
        of_layers: Mapping[str, Any] | str | Path = source
        model_type = hf_field(fields, "model_type", str, where)
        if model_type in TEXT_AND_IMAGES:
            fields = of_layers = text_fields(fields, where)
            model_type, where = fields["model_type"], f"{where}: text_config"
        if model_type == LONGCAT:
            fields = longcat_fields(fields, where)
        if model_type not in DEFAULT_ROUTING:
            legal = ", ".join(sorted((*DEFAULT_ROUTING, *TEXT_AND_IMAGES)))
            raise ValueError(f"{where}: model_type = {model_type!r}; legal: {legal}")
        if (activation := hf_field(fields, "hidden_act", str, where, default="silu")) != "silu":
            raise ValueError(f"{where}: hidden_act = {activation!r}; legal: 'silu'")
        named = "torch_dtype" if fields.get("torch_dtype") else "dtype"
        dtype = fields.get(named) or "bfloat16"
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"{where}: {named} = {reprlib.repr(dtype)}; legal: 'float32', 'bfloat16', 'float16'")

        def positive(name: str, *, most: int = MAX_SIZE, **options: Any) -> int:
            value = hf_field(fields, name, int, where, **options)
            if not 1 <= value <= most:
                raise ValueError(f"{where}: {name} = {reprlib.repr(value)}; legal: 1 to {most}")
            return value

        is_v4 = model_type == "deepseek_v4"
        check_fields(fields, where, model_type)
        longest = default_of(model_type, "max_position_embeddings")
        num_layers = positive("num_hidden_layers", most=MAX_LAYERS)
        attention: MLAConfig | V32Config | tuple[V4Config, ...]
        try:
            if is_v4:
                _refuse_unlike_v4(fields, where)
            moe = _moe_from_hf(fields, model_type, where)
            streams = _streams_from_hf(fields, where) if is_v4 else None
            mlp_layers = _mlp_layers_from_hf(fields, model_type, where, num_layers, moe is not None)
            default = default_of(model_type, "rms_norm_eps", 1e-6)
            eps = hf_field(fields, "rms_norm_eps", float, where, **default)
            _check_eps("rms_norm_eps", eps)
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
        if is_v4:
            attention = tuple(V4Config.from_hf(of_layers, layer) for layer in range(num_layers))
        else:
            attention = (V32Config if model_type in V32_TYPES else MLAConfig).from_hf(of_layers)
        chooses = layers_with_indexer(fields, where) if model_type in SHARING_TYPES else ()
        # V4 has no dense MLP; its experts' width is the only one.
        width = "moe_intermediate_size" if is_v4 else "intermediate_size"
        tied = default_of(model_type, "tie_word_embeddings", False)
        return cls(
            attention=attention,
            moe=moe,
            streams=streams,
            mlp_layers=mlp_layers,
            vocab_size=positive("vocab_size"),
            hidden_size=positive("hidden_size"),
            intermediate_size=positive(width),
            num_layers=num_layers,
            rms_norm_eps=eps,
            tie_word_embeddings=hf_field(fields, "tie_word_embeddings", bool, where, **tied),
            max_position_embeddings=positive("max_position_embeddings", **longest),
            eos_token_ids=_eos_token_ids(source, fields, model_type, where),
            dtype=dtype,
            indexer_layers=() if all(chooses) else chooses,
        )


def _eos_token_ids(
    source: Mapping[str, Any] | str | Path, fields: Mapping[str, Any], model_type: str, where: str
) -> tuple[int, ...]:
    name = "eos_token_id"
    if not isinstance(source, Mapping):
        generation, generation_where = read_optional_config(Path(source) / "generation_config.json")
        if name in generation:
            fields, where = generation, generation_where
    if name not in fields and name not in DEFAULTS[model_type]:
        raise ValueError(f"{where}: field {name!r} is missing")
    value = fields.get(name, DEFAULTS[model_type].get(name))
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"{where}: eos_token_id = {value!r}; legal: a token id, a list of them, or null")
    return tuple(ids)


def _moe_from_hf(fields: Mapping[str, Any], model_type: str, where: str) -> MoEConfig | None:
    is_v4 = model_type == "deepseek_v4"
    if "n_routed_experts" in DEFAULTS[model_type]:
        check_values(fields, where, {"n_routed_experts": ()})
        return None
    num_experts = hf_field(fields, "n_routed_experts", int, where, nullable=not is_v4)
    if num_experts is None:
        return None
    routing = hf_field(fields, "topk_method", str, where, default=DEFAULT_ROUTING[model_type])
    scoring = fields.get("scoring_func")
    if is_v4:
        scoring = hf_field(fields, "scoring_func", str, where, default="sqrtsoftplus")
    elif model_type == LONGCAT:
        scoring = "softmax"
    elif scoring is not None and scoring != _SCORING.get(routing, scoring):
        raise ValueError(f"scoring_func = {scoring!r}; legal with topk_method {routing!r}: {_SCORING[routing]!r}")

    zero = 0
    if model_type == LONGCAT:
        zero = hf_field(fields, "zero_expert_num", int, where, nullable=True) or 0

    def field(name: str, kind: type) -> Any:
        # For V2 and V4 null is the default too. V3's code would take null for false, or fail.
        has_default = name not in fields or model_type in ("deepseek_v2", "deepseek_v4")
        return hf_field(fields, name, kind, where, **(default_of(model_type, name) if has_default else {}))

    return MoEConfig(
        num_experts=num_experts,
        top_k=hf_field(fields, "num_experts_per_tok", int, where),
        intermediate_size=hf_field(fields, "moe_intermediate_size", int, where),
        num_shared=field("n_shared_experts", int),
        routing=routing,
        n_group=field("n_group", int),
        topk_group=field("topk_group", int),
        norm_topk_prob=field("norm_topk_prob", bool),
        routed_scaling_factor=field("routed_scaling_factor", float),
        scoring=scoring,
        swiglu_limit=hf_field(fields, "swiglu_limit", float, where, default=10.0) if is_v4 else None,
        num_zero=zero,
    )


def _refuse_unlike_v4(fields: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if a field of the routing has a value that V4 doesn't have."""
    only = {
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
    }
    for name, value in only.items():
        if fields.get(name) not in (None, value):
            raise ValueError(f"{where}: {name} = {fields[name]!r}; legal for deepseek_v4: {value!r}, or null")
    if fields.get("scoring_func") not in (None, "sqrtsoftplus", "sigmoid"):
        raise ValueError(
            f"{where}: scoring_func = {fields['scoring_func']!r}; legal for deepseek_v4: 'sqrtsoftplus', 'sigmoid', or"
            " null"
        )


def _streams_from_hf(fields: Mapping[str, Any], where: str) -> StreamsConfig:
    return StreamsConfig(
        count=hf_field(fields, "hc_mult", int, where, default=4),
        sinkhorn_iterations=hf_field(fields, "hc_sinkhorn_iters", int, where, default=20),
        eps=hf_field(fields, "hc_eps", float, where, default=1e-6),
        norm_eps=hf_field(fields, "rms_norm_eps", float, where, default=1e-6),
    )


def _mlp_layers_from_hf(
    fields: Mapping[str, Any], model_type: str, where: str, num_layers: int, has_experts: bool
) -> tuple[MLPKind, ...]:
    """The kind of every layer's MLP: from the list of kinds, or without it from the older fields that count layers.
    LongCat-Flash has neither: its kinds alternate."""
    if model_type == LONGCAT:
        return ("shortcut", "dense") * (num_layers // 2)
    is_v4 = model_type == "deepseek_v4"
    listed = fields.get("mlp_layer_types")
    if listed is not None:
        legal = ("hash_moe", "moe") if is_v4 else ("dense", "sparse") if has_experts else ("dense",)
        if not isinstance(listed, list) or len(listed) < num_layers or any(kind not in legal for kind in listed):
            raise ValueError(
                f"{where}: mlp_layer_types = {listed!r:.80}; legal: a list of at least {num_layers}, each "
                f"{' or '.join(legal)}"
            )
        return tuple(_MLP_KINDS[kind] for kind in listed[:num_layers])
    if is_v4:
        hashed = hf_field(fields, "num_hash_layers", int, where, default=3)
        return tuple("hash_moe" if layer < hashed else "moe" for layer in range(num_layers))
    first = hf_field(fields, "first_k_dense_replace", int, where, **default_of(model_type, "first_k_dense_replace"))
    every = hf_field(fields, "moe_layer_freq", int, where, default=1)
    if every < 1:
        raise ValueError(f"{where}: moe_layer_freq = {every}; legal: a positive integer")
    return tuple(
        "moe" if has_experts and layer >= first and layer % every == 0 else "dense" for layer in range(num_layers)
    )
