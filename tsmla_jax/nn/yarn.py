"""Yarn context extension: its fields, and the magnitudes and rope frequencies that follow from them."""

from __future__ import annotations

import dataclasses
import math
import numbers

import jax
import numpy as np


def is_finite(value: object) -> bool:
    """Whether a config's value is a finite number; a bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def yarn_mscale(factor: float, mscale: float) -> float:
    """The yarn magnitude correction ms(f, m) = 0.1 m ln f + 1 for f > 1, else 1 (Peng et al., arXiv:2309.00071)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """Yarn context extension (arXiv:2309.00071), with DeepSeek's names and defaults. attention_factor is transformers'.

    Attributes:
        factor: how much longer the context is than the original one, >= 1.
        original_max_position_embeddings: context length of the pretraining, in tokens.
        beta_fast: rotations over the original context above which a frequency is kept as it is.
        beta_slow: rotations below which a frequency is divided by `factor`; a linear ramp in between. If it is above
            beta_fast, see `inverse_frequencies`.
        mscale: cos and sin are multiplied by ms(factor, mscale) / ms(factor, mscale_all_dim).
        mscale_all_dim: MLA's softmax scale is multiplied by ms(factor, mscale_all_dim)^2 when this is not zero; V4's is
            not.
        attention_factor: if given, the multiplier of cos and sin in place of the ratio above.

    Raises:
        ValueError: a value is out of its range.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            optional = field.name == "attention_factor"
            if not (is_finite(value) or (optional and value is None)):
                legal = "a finite number above 0, or None" if optional else "a finite number"
                raise ValueError(f"YarnConfig: {field.name}: got {value!r}; legal: {legal}")
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise ValueError(f"YarnConfig: attention_factor: got {self.attention_factor}; legal: above 0, or None")
        if not self.factor >= 1.0:
            raise ValueError(f"YarnConfig: factor: got {self.factor}; legal: at least 1")
        if self.original_max_position_embeddings <= 0:
            got = self.original_max_position_embeddings
            raise ValueError(f"YarnConfig: original_max_position_embeddings: got {got}; legal: above 0")
        if not (self.beta_fast > 0 and self.beta_slow > 0):
            raise ValueError(
                f"YarnConfig: beta_fast, beta_slow: got {self.beta_fast}, {self.beta_slow}; legal: above 0"
            )

    @property
    def magnitude(self) -> float:
        """The multiplier of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)


def _yarn_boundary(rotations: float, dim: int, theta: float, original_len: int) -> float:
    """The (fractional) pair index whose angle turns `rotations` times over the original context."""
    return dim * math.log(original_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def inverse_frequencies(rope_dim: int, theta: float, yarn: YarnConfig | None) -> np.ndarray:
    """Angle per position of each of rope_dim / 2 rope pairs: f32 [R / 2], highest frequency first.

    With yarn, pairs below the low boundary keep theta^(-2i/R), those above the high one are divided by `factor`, and a
    linear ramp blends the two in between. If the low boundary is above the high one (as with beta_slow above beta_fast,
    or an original context of a few tokens), kept and divided pairs change places, as in DeepSeek's code.
    """
    base = 1.0 / theta ** (np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)
    if yarn is None:
        return base.astype(np.float32)
    args = (rope_dim, theta, yarn.original_max_position_embeddings)
    low = max(math.floor(_yarn_boundary(yarn.beta_fast, *args)), 0)
    high = min(math.ceil(_yarn_boundary(yarn.beta_slow, *args)), rope_dim - 1)
    # Equal boundaries make the ramp a step; the small width only avoids 0 / 0.
    width = high - low if high != low else 1e-3
    ramp = np.clip((np.arange(rope_dim // 2) - low) / width, 0.0, 1.0)
    return (base * (1.0 - ramp) + base / yarn.factor * ramp).astype(np.float32)
