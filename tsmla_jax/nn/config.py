"""The shape of one MLA layer, read from a Hugging Face `config.json`.

Everything here is static: an `MLAConfig` is hashable, so it can be closed over or passed to `jax.jit` as a static
argument. Only what attention needs is kept; the rest of a model's config is its own business.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

RopeLayout = Literal["interleaved", "halves"]

_ABSENT: Any = object()
_REQUIRED_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def yarn_mscale(factor: float, mscale: float) -> float:
    """The yarn magnitude correction ms(f, m) = 0.1 m ln f + 1 for f > 1, else 1 (Peng et al., arXiv:2309.00071)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """Yarn context extension (arXiv:2309.00071), with DeepSeek's names and defaults.

    Attributes:
        factor: how much longer the context is than the original one, >= 1.
        original_max_position_embeddings: context length of the pretraining, in tokens.
        beta_fast, beta_slow: rotations over the original context above which a frequency is kept as it is, and below
            which it is interpolated by `factor`; a linear ramp in between.
        mscale, mscale_all_dim: cos and sin are multiplied by ms(factor, mscale) / ms(factor, mscale_all_dim), and the
            softmax scale by ms(factor, mscale_all_dim)^2 when mscale_all_dim is not zero.
        attention_factor: if given, the multiplier of cos and sin in place of the ratio above.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if not self.factor >= 1.0:
            raise ValueError(f"YarnConfig: {self.factor=} must be >= 1")
        if self.original_max_position_embeddings <= 0:
            raise ValueError(f"YarnConfig: {self.original_max_position_embeddings=} must be > 0")
        if not (self.beta_fast > 0 and self.beta_slow > 0):
            raise ValueError(f"YarnConfig: {self.beta_fast=} and {self.beta_slow=} must be > 0")


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """One multi-head latent attention layer of DeepSeek-V2, V2-Lite, V3, R1 or Kimi-K2.

    Attributes:
        hidden_size: E, width of the residual stream.
        num_attention_heads: H.
        kv_lora_rank: L, width of the latent that the cache holds.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: N, R and V; a query or key head is N + R wide.
        q_lora_rank: rank of the query's low-rank projection, or None when q comes straight from x (V2-Lite).
        rope_theta: base of the rotary angles.
        yarn: context extension, or None.
        rope_layout: the order of rotated rope values in q and in the cached k_rope: "interleaved" (pairs 2i, 2i+1, as
            DeepSeek's checkpoints have them) or "halves" (first members of all pairs, then the second). Attention is
            the same; caches written in one layout can't be read in the other.
        rope_interleave: whether the checkpoint's own rope columns are interleaved pairs (Hugging Face's field of that
            name; true for every DeepSeek and Kimi checkpoint).
        attention_bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have a bias.
        a_layernorm_eps: epsilon of q_a_layernorm and kv_a_layernorm; 1e-6 whatever the model's rms_norm_eps says.
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

    def __post_init__(self) -> None:
        for name in (*_REQUIRED_SIZES, "q_lora_rank"):
            value = getattr(self, name)
            if name == "q_lora_rank" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ValueError(f"MLAConfig: {name}={value!r} must be a positive integer")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"MLAConfig: {self.qk_rope_head_dim=} must be even: rope rotates pairs")
        if not self.rope_theta > 1.0:
            raise ValueError(f"MLAConfig: {self.rope_theta=} must be > 1")
        if self.rope_layout not in ("interleaved", "halves"):
            raise ValueError(f"MLAConfig: {self.rope_layout=} must be 'interleaved' or 'halves'")

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
        """(N + R)^-0.5, times ms(factor, mscale_all_dim)^2 with yarn and a non-zero mscale_all_dim."""
        scale = self.qk_head_dim**-0.5
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim) ** 2
        return scale

    @property
    def rope_magnitude(self) -> float:
        """What cos and sin are multiplied by; 1 without yarn."""
        if self.yarn is None:
            return 1.0
        if self.yarn.attention_factor is not None:
            return self.yarn.attention_factor
        factor = self.yarn.factor
        return yarn_mscale(factor, self.yarn.mscale) / yarn_mscale(factor, self.yarn.mscale_all_dim)

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path, *, rope_layout: RopeLayout | None = None) -> "MLAConfig":
        """Reads the attention's fields of a Hugging Face config.

        Args:
            source: the parsed config, or the path of a `config.json` or of the directory that holds it.
            rope_layout: the layout of rotated values; None means the checkpoint's own order.

        Raises:
            ValueError: a field is missing, has the wrong type or an impossible value, or the rope type is neither
                default nor yarn. The text names the field and, when `source` is a path, the file.
        """
        fields, where = read_hf_config(source)
        interleave = hf_field(fields, "rope_interleave", bool, where, default=True)
        q_lora_rank = hf_field(fields, "q_lora_rank", int, where, nullable=True)
        theta, yarn = rope_fields(fields, where)
        sizes = {name: hf_field(fields, name, int, where) for name in _REQUIRED_SIZES}
        bias = hf_field(fields, "attention_bias", bool, where, default=False)
        try:
            return cls(
                **sizes,
                q_lora_rank=q_lora_rank,
                rope_theta=theta,
                yarn=yarn,
                rope_layout=rope_layout or ("interleaved" if interleave else "halves"),
                rope_interleave=interleave,
                attention_bias=bias,
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def read_hf_config(source: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], str]:
    """The fields of a Hugging Face config, and a name for it in error texts.

    Args:
        source: a mapping (returned as it is), a `config.json`, or the directory that holds one.

    Raises:
        ValueError: no such file, not JSON, or not a JSON object; names the file.
        TypeError: source is neither a mapping nor a path.
    """
    if isinstance(source, Mapping):
        return source, "config"
    if not isinstance(source, str | Path):
        raise TypeError(f"source={type(source).__name__} must be a mapping, or the path of a config.json or its folder")
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read the config: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(fields).__name__}")
    return fields, str(path)


def hf_field(
    fields: Mapping[str, Any],
    name: str,
    kind: type,
    where: str,
    *,
    default: Any = _ABSENT,
    nullable: bool = False,
) -> Any:
    """One field of a Hugging Face config, checked.

    Args:
        kind: int, float, bool, str or dict; an integer counts as a float, a bool never as a number.
        where: what to call the config in an error.
        default: what an absent field (or a null one, unless nullable) means; without it the field is required.
        nullable: null is legal and returned as None. The field must still be present unless it has a default.

    Raises:
        ValueError: naming `where` and the field.
    """
    value: Any = fields.get(name, _ABSENT)
    if value is None and nullable:
        return None
    if value is _ABSENT or (value is None and default is not _ABSENT):
        if default is _ABSENT:
            raise ValueError(f"{where}: field {name!r} is missing")
        return default
    legal: Any = (int, float) if kind is float else kind
    if not isinstance(value, legal) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: field {name!r} must be {kind.__name__}, got {value!r}")
    return float(value) if kind is float else value


def rope_fields(fields: Mapping[str, Any], where: str) -> tuple[float, YarnConfig | None]:
    """rope_theta and yarn, from the old spelling (rope_theta, rope_scaling), the new one (rope_parameters), or both.

    transformers 5 writes rope_parameters, sometimes next to the old fields. Where both are present they must agree: a
    silent choice between two angles is a model that is subtly wrong.
    """
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}

    def take(source: str, key: str, value: Any) -> None:
        if value is None:
            return
        if key in merged and merged[key] != value:
            raise ValueError(f"{where}: fields {origin[key]!r} and {source!r} disagree: {merged[key]!r} and {value!r}")
        merged[key], origin[key] = value, source

    take("rope_theta", "rope_theta", fields.get("rope_theta"))
    for group in ("rope_scaling", "rope_parameters"):
        values = hf_field(fields, group, dict, where, default=None)
        for key, value in (values or {}).items():
            # "type" is the older spelling of "rope_type".
            take(f"{group}.{key}", "rope_type" if key == "type" else key, value)

    theta = hf_field(merged, "rope_theta", float, where)
    kind = hf_field(merged, "rope_type", str, where, default="default")
    if merged.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{where}: field {origin['partial_rotary_factor']!r} must be 1: MLA rotates all of qk_rope_head_dim, "
            f"got {merged['partial_rotary_factor']!r}"
        )
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(f"{where}: field {origin['rope_type']!r} must be 'default' or 'yarn', got {kind!r}")
    if merged.get("truncate", True) is not True:
        raise ValueError(f"{where}: field {origin['truncate']!r} must be true, got {merged['truncate']!r}")
    group_name = f"{where}: {origin['rope_type'].split('.')[0]}"
    numbers = {
        "factor": hf_field(merged, "factor", float, group_name),
        "beta_fast": hf_field(merged, "beta_fast", float, group_name, default=32.0),
        "beta_slow": hf_field(merged, "beta_slow", float, group_name, default=1.0),
        "mscale": hf_field(merged, "mscale", float, group_name, default=1.0),
        "mscale_all_dim": hf_field(merged, "mscale_all_dim", float, group_name, default=0.0),
        "attention_factor": hf_field(merged, "attention_factor", float, group_name, default=None),
    }
    original_len = hf_field(merged, "original_max_position_embeddings", int, group_name)
    try:
        return theta, YarnConfig(original_max_position_embeddings=original_len, **numbers)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
