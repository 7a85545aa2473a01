"""The configuration of a whole DeepSeek-V2/V3 decoder, read from a Hugging Face `config.json`.

`tsmla_jax.nn.MLAConfig` describes the attention; this adds what the rest of the model needs: sizes, the experts'
routing and the token ids that end a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tsmla_jax.nn.config import MLAConfig, hf_field, read_hf_config

Routing = Literal["greedy", "group_limited_greedy", "noaux_tc"]
ROUTINGS: tuple[Routing, ...] = ("greedy", "group_limited_greedy", "noaux_tc")

# What a checkpoint without `topk_method` means: transformers writes none for V3, whose only routing is noaux_tc.
_DEFAULT_ROUTING: dict[str, Routing] = {"deepseek_v2": "greedy", "deepseek_v3": "noaux_tc", "kimi_k2": "noaux_tc"}
_SCORING: dict[Routing, str] = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}


@dataclass(frozen=True)
class MoEConfig:
    """Sizes and routing of the mixture-of-experts layers.

    Attributes:
      num_experts: routed experts E.
      top_k: experts K that each token visits.
      intermediate_size: width of one routed expert.
      num_shared: shared experts, fused into one MLP of width num_shared * intermediate_size; 0 for none.
      routing: "greedy" (softmax, top-k), "group_limited_greedy" (softmax, top-k within the topk_group groups with the
        best single expert) or "noaux_tc" (sigmoid; score + correction bias selects, groups by their best two).
      n_group, topk_group: number of expert groups, and how many of them a token may use.
      norm_topk_prob: the chosen weights are divided by their sum.
      routed_scaling_factor: multiplies the chosen weights, after the division.
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

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise ValueError(f"topk_method = {self.routing!r}; legal: {', '.join(ROUTINGS)}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"num_experts_per_tok = {self.top_k}; legal: 1 to n_routed_experts = {self.num_experts}")
        if self.routing != "greedy":
            if self.n_group < 1 or self.num_experts % self.n_group:
                raise ValueError(f"n_group = {self.n_group}; legal: a divisor of n_routed_experts = {self.num_experts}")
            if not 1 <= self.topk_group <= self.n_group:
                raise ValueError(f"topk_group = {self.topk_group}; legal: 1 to n_group = {self.n_group}")
            if self.top_k > self.topk_group * (self.num_experts // self.n_group):
                raise ValueError(
                    f"num_experts_per_tok = {self.top_k}; legal: at most the {self.num_experts // self.n_group} "
                    f"experts of each of topk_group = {self.topk_group} groups"
                )
            if self.routing == "noaux_tc" and self.n_group > 1 and self.num_experts // self.n_group < 2:
                raise ValueError(f"n_group = {self.n_group}; legal for noaux_tc: groups of at least two experts")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only DeepSeek-V2/V3 model.

    Attributes:
      attention: the attention of every layer.
      moe: the experts, or None when every layer is dense.
      vocab_size, hidden_size, intermediate_size, num_layers: as in `config.json`.
      first_dense_layers: layers [0, first_dense_layers) have a dense MLP.
      moe_layer_freq: from there on, layer i has experts when i % moe_layer_freq == 0.
      rms_norm_eps: of the layers' and the final norm (the attention's own norms have theirs in `attention`).
      tie_word_embeddings: the output projection is the embedding.
      max_position_embeddings: the longest text the model was made for, in tokens.
      eos_token_ids: tokens that end a text; may be empty.
      dtype: the checkpoint's own compute dtype, a numpy name ("bfloat16", "float16" or "float32").
    """

    attention: MLAConfig
    moe: MoEConfig | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    first_dense_layers: int
    moe_layer_freq: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer` (counted from 0) has experts."""
        return self.moe is not None and layer >= self.first_dense_layers and layer % self.moe_layer_freq == 0

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> ModelConfig:
        """Reads a `config.json` of DeepSeek-V2, V2-Lite, V3, R1 or Kimi-K2.

        Args:
          source: the parsed file, its path, or the checkpoint directory. From a directory, `generation_config.json`
            has the last word on the end-of-text ids, when there is one.

        Raises:
          ValueError: a field that the model needs is missing or has a value this model does not know.
        """
        fields, where = read_hf_config(source)
        model_type = hf_field(fields, "model_type", str, where)
        if model_type not in _DEFAULT_ROUTING:
            raise ValueError(f"{where}: model_type = {model_type!r}; legal: {', '.join(sorted(_DEFAULT_ROUTING))}")
        if (activation := hf_field(fields, "hidden_act", str, where, default="silu")) != "silu":
            raise ValueError(f"{where}: hidden_act = {activation!r}; legal: 'silu'")
        dtype = fields.get("torch_dtype") or fields.get("dtype") or "bfloat16"
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"{where}: torch_dtype = {dtype!r}; legal: 'float32', 'bfloat16', 'float16'")

        def positive(name: str, **options: Any) -> int:
            value = hf_field(fields, name, int, where, **options)
            if value < 1:
                raise ValueError(f"{where}: {name} = {value}; legal: a positive integer")
            return value

        try:
            moe = _moe_from_hf(fields, _DEFAULT_ROUTING[model_type], where)
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
        return cls(
            attention=MLAConfig.from_hf(source),
            moe=moe,
            vocab_size=positive("vocab_size"),
            hidden_size=positive("hidden_size"),
            intermediate_size=positive("intermediate_size"),
            num_layers=positive("num_hidden_layers"),
            first_dense_layers=hf_field(fields, "first_k_dense_replace", int, where, default=0),
            moe_layer_freq=positive("moe_layer_freq", default=1),
            rms_norm_eps=hf_field(fields, "rms_norm_eps", float, where, default=1e-6),
            tie_word_embeddings=hf_field(fields, "tie_word_embeddings", bool, where, default=False),
            max_position_embeddings=positive("max_position_embeddings", default=2048),
            eos_token_ids=_eos_token_ids(source, fields, where),
            dtype=dtype,
        )


def _eos_token_ids(source: Mapping[str, Any] | str | Path, fields: Mapping[str, Any], where: str) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    if not isinstance(source, Mapping):
        path = Path(source) / "generation_config.json"
        if path.is_file():
            generation, generation_where = read_hf_config(path)
            if "eos_token_id" in generation:
                value, where = generation["eos_token_id"], generation_where
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"{where}: eos_token_id = {value!r}; legal: a token id, a list of them, or null")
    return tuple(ids)


def _moe_from_hf(fields: Mapping[str, Any], default_routing: Routing, where: str) -> MoEConfig | None:
    if fields.get("n_routed_experts") is None:
        return None
    routing = hf_field(fields, "topk_method", str, where, default=default_routing)
    scoring = fields.get("scoring_func")
    if scoring is not None and scoring != _SCORING.get(routing, scoring):
        raise ValueError(f"scoring_func = {scoring!r}; legal with topk_method {routing!r}: {_SCORING[routing]!r}")
    return MoEConfig(
        num_experts=hf_field(fields, "n_routed_experts", int, where),
        top_k=hf_field(fields, "num_experts_per_tok", int, where),
        intermediate_size=hf_field(fields, "moe_intermediate_size", int, where),
        num_shared=hf_field(fields, "n_shared_experts", int, where, default=0),
        routing=routing,
        n_group=hf_field(fields, "n_group", int, where, default=1),
        topk_group=hf_field(fields, "topk_group", int, where, default=1),
        norm_topk_prob=hf_field(fields, "norm_topk_prob", bool, where, default=False),
        routed_scaling_factor=hf_field(fields, "routed_scaling_factor", float, where, default=1.0),
    )
