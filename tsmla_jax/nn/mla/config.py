"""The shape of one MLA layer, read from a Hugging Face `config.json`.

An `MLAConfig` is static and hashable: it can be closed over, or be an argument of `jax.jit`, which takes it as static.
It holds only the fields of the model's config that attention needs.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import jax

from tsmla_jax.nn.checkpoints.hf_config import RopeFields, hf_field, read_hf_config, rope_fields
from tsmla_jax.nn.checkpoints.known_fields import (
    GATES,
    LONGCAT_TYPES,
    NOPE_TYPES,
    SCALED_TYPES,
    check_mla,
    check_values,
)
from tsmla_jax.nn.yarn import YarnConfig, is_finite, yarn_mscale

RopeLayout = Literal["interleaved", "halves"]
OutputGate = Literal["head", "element"]

_REQUIRED_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class QueryScale:
    """The factor of a query by its position p: 1 + beta log(1 + floor(p / period)), as in Mistral Small 4. Llama 4
    has p + 1 in the place of p.

    Attributes:
        beta: at least 0; a config's llama_4_scaling_beta.
        period: tokens of context that the model was trained with; a config's original_max_position_embeddings.

    Raises:
        ValueError: a value is not legal.
    """

    beta: float
    period: int

    def __post_init__(self) -> None:
        if not (is_finite(self.beta) and self.beta >= 0):
            raise ValueError(f"QueryScale: beta: got {self.beta!r}; legal: a finite number, at least 0")
        if isinstance(self.period, bool) or not isinstance(self.period, int) or self.period <= 0:
            raise ValueError(f"QueryScale: period: got {self.period!r}; legal: a positive integer")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """One multi-head latent attention layer of DeepSeek-V2, V2-Lite, V3, R1, Kimi-K2, or a model with the same layer.

    Other models have variants of it: Mistral Small 4 a query_scale, LongCat-Flash scale_latents, and models that mix
    such layers with linear attention (Kimi-Linear, Kimi-K3, Ling 3) rotates=False or an output_gate.

    Attributes:
        hidden_size: E, width of the residual stream.
        num_attention_heads: H.
        kv_lora_rank: L, width of the latent that the cache holds.
        qk_nope_head_dim: N, width of a head's query and key without rope.
        qk_rope_head_dim: R, even; a query or key head is N + R wide.
        v_head_dim: V.
        q_lora_rank: rank of the query's low-rank projection, or None when q comes straight from x (V2-Lite).
        rope_theta: base of the rotary angles.
        yarn: context extension, or None.
        rope_layout: the order of rotated rope values in q and in the cached k_rope: "interleaved" (pairs 2i, 2i+1, as
            DeepSeek's checkpoints have them) or "halves" (first members of all pairs, then the second). Attention is
            the same; caches written in one layout can't be read in the other.
        rope_interleave: whether the checkpoint's own rope columns are interleaved pairs (Hugging Face's field of that
            name; true for DeepSeek's checkpoints).
        attention_bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have a bias.
        a_layernorm_eps: epsilon of q_a_layernorm and kv_a_layernorm. Most models have 1e-6 whatever their rms_norm_eps
            is; Kimi-K3 takes its rms_norm_eps.
        query_scale: the factor of queries by position, or None.
        scale_latents: whether queries are multiplied by sqrt(hidden_size / q_lora_rank), and the normed latent by
            sqrt(hidden_size / kv_lora_rank).
        rotates: whether the R rope columns are rotated. If they are not, all heads still share these columns of the
            keys, and positions have no effect.
        output_gate: whether a gate, the sigmoid of x times g_proj, multiplies each "head" or each "element" of a head
            before o_proj; None means that there is no gate.

    Raises:
        ValueError: a value is not legal.
    """

    hidden_size: int
    num_attention_heads: int
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    q_lora_rank: int | None = None
    rope_theta: float = 10000.0
    yarn: YarnConfig | None = None
    rope_layout: RopeLayout = "interleaved"
    rope_interleave: bool = True
    attention_bias: bool = False
    a_layernorm_eps: float = 1e-6
    query_scale: QueryScale | None = None
    scale_latents: bool = False
    rotates: bool = True
    output_gate: OutputGate | None = None

    def __post_init__(self) -> None:
        for name in (*_REQUIRED_SIZES, "q_lora_rank"):
            value = getattr(self, name)
            if name == "q_lora_rank" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                legal = "a positive integer or None" if name == "q_lora_rank" else "a positive integer"
                raise ValueError(f"MLAConfig: {name}: got {value!r}; legal: {legal}")
        if self.qk_rope_head_dim % 2:
            got = self.qk_rope_head_dim
            raise ValueError(f"MLAConfig: qk_rope_head_dim: got {got}; legal: even, as rope rotates pairs")
        if self.scale_latents and self.q_lora_rank is None:
            raise ValueError("MLAConfig: q_lora_rank: got None; legal with scale_latents: a positive integer")
        if not (is_finite(self.rope_theta) and self.rope_theta > 1):
            raise ValueError(f"MLAConfig: rope_theta: got {self.rope_theta!r}; legal: a finite number above 1")
        if not (is_finite(self.a_layernorm_eps) and self.a_layernorm_eps >= 0):
            raise ValueError(
                f"MLAConfig: a_layernorm_eps: got {self.a_layernorm_eps!r}; legal: a finite number, at least 0"
            )
        if self.output_gate not in ("head", "element", None):
            raise ValueError(f"MLAConfig: output_gate: got {self.output_gate!r}; legal: 'head', 'element', None")
        if self.rope_layout not in ("interleaved", "halves"):
            raise ValueError(f"MLAConfig: rope_layout: got {self.rope_layout!r}; legal: 'interleaved' or 'halves'")

    @property
    def qk_head_dim(self) -> int:
        """N + R, width of an expanded query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dim(self) -> int:
        """D = L + R, width of one cached token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(N + R)^-0.5, times ms(factor, mscale_all_dim)^2 with yarn and a non-zero mscale_all_dim, and, with
        scale_latents, times sqrt(hidden_size / q_lora_rank), by which the queries would be multiplied.
        """
        scale = self.qk_head_dim**-0.5
        if self.scale_latents and self.q_lora_rank is not None:
            scale *= (self.hidden_size / self.q_lora_rank) ** 0.5
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim) ** 2
        return scale

    @property
    def latent_scale(self) -> float:
        """The factor of the normed latent; 1 without scale_latents."""
        return (self.hidden_size / self.kv_lora_rank) ** 0.5 if self.scale_latents else 1.0

    @property
    def rope_magnitude(self) -> float:
        """Factor of cos and sin; 1 without yarn."""
        return 1.0 if self.yarn is None else self.yarn.magnitude

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path, *, rope_layout: RopeLayout | None = None) -> "MLAConfig":
        """Reads the attention's fields of a Hugging Face config.

        Args:
            source: the parsed config, or the path of a `config.json`, of Mistral's `params.json`, or of the directory
                that holds one of them. Its model_type is deepseek_v2, deepseek_v3, kimi_k2, glm4_moe_lite
                (GLM-4.7-Flash), youtu, axk1 or sarvam_mla, whose layers are the same; mistral4 (Mistral Small 4), whose
                queries have a query_scale; longcat_flash, with scale_latents; kimi_linear, kimi_k3 (its text_config is
                read) and bailing_hybrid (Ling 3), for their layers of this kind; deepseek_v32 and glm_moe_dsa (GLM-5),
                whose layer is read without its indexer; or absent.
            rope_layout: the layout of rotated values; None means the checkpoint's own order.

        Raises:
            ValueError: a field is missing, has the wrong type or an impossible value, or describes another layer (a
                model type that is none of these, a rope type that is neither default nor yarn, an unknown key of rope,
                a multiplier, a gate, a window). The message names the field and, when `source` is a path, the file.
            TypeError: source is neither a mapping, a str nor a Path.
        """
        fields, where = read_hf_config(source)
        if fields.get("model_type") == "kimi_k3":
            text = hf_field(fields, "text_config", dict, where)
            fields, where = {**text, "model_type": "kimi_k3"}, f"{where}: text_config"
        check_mla(fields, where)
        interleave = hf_field(fields, "rope_interleave", bool, where, default=True)
        sizes = {name: hf_field(fields, name, int, where) for name in _REQUIRED_SIZES}
        width = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
        check_values(fields, where, {"qk_head_dim": (width,), "q_head_dim": (width,)})
        q_lora_rank = hf_field(fields, "q_lora_rank", int, where, nullable=True)
        model_type = fields.get("model_type")
        scaled, rotates = model_type in SCALED_TYPES, model_type not in NOPE_TYPES
        rope = rope_fields(fields, where, known=_SCALED_KEYS if scaled else ()) if rotates else _NO_ROPE
        bias = hf_field(fields, "attention_bias", bool, where, default=False)
        eps = hf_field(fields, "rms_norm_eps", float, where) if model_type == "kimi_k3" else 1e-6
        try:
            return cls(
                **sizes,
                q_lora_rank=q_lora_rank,
                rope_theta=rope.theta,
                yarn=rope.yarn,
                rope_layout=rope_layout or ("interleaved" if interleave else "halves"),
                rope_interleave=interleave,
                attention_bias=bias,
                query_scale=_query_scale(rope, where, sizes["qk_rope_head_dim"] / width) if scaled else None,
                scale_latents=model_type in LONGCAT_TYPES,
                rotates=rotates,
                output_gate=cast(OutputGate | None, GATES.get(str(model_type))),
                a_layernorm_eps=eps,
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


_NO_ROPE = RopeFields(10000.0, None, {})
# Keys of rope in configs of Mistral Small 4. max_position_embeddings repeats the model's field of that name.
_SCALED_KEYS = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")


def _query_scale(rope: RopeFields, where: str, rotated: float) -> QueryScale | None:
    """The query_scale of a config whose model may have one.

    rotated: the share of a head's columns that is rotated.
    """
    check_values(rope.keys, where, {"partial_rotary_factor": (1, rotated)})
    beta = hf_field(rope.keys, "llama_4_scaling_beta", float, where, default=0.0)
    if beta == 0:
        return None
    return QueryScale(beta, hf_field(rope.keys, "original_max_position_embeddings", int, where))
