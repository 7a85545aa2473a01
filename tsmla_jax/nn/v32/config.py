"""The shape of one DeepSeek-V3.2 attention layer, read from a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from tsmla_jax.nn.hf_config import hf_field, read_hf_config
from tsmla_jax.nn.known_fields import check_v32
from tsmla_jax.nn.mla.config import MLAConfig


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class V32Config:
    """One V3.2 attention layer.

    Attributes:
        mla: the attention itself; needs q_lora_rank, from whose normed output the indexer's queries come.
        index_n_heads: Hi, heads of the indexer.
        index_head_dim: Di; its first qk_rope_head_dim columns are rotated, as halves.
        index_topk: how many keys a token attends to at most.

    Raises:
        ValueError: a value is not legal.
    """

    mla: MLAConfig
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048

    def __post_init__(self) -> None:
        for name in ("index_n_heads", "index_head_dim", "index_topk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ValueError(f"V32Config: {name}: got {value!r}; legal: a positive integer")
        if self.mla.q_lora_rank is None:
            raise ValueError("V32Config: mla.q_lora_rank: got None; legal: a rank, which the indexer reads")
        if self.index_head_dim < self.mla.qk_rope_head_dim:
            raise ValueError(
                f"V32Config: index_head_dim: got {self.index_head_dim}; legal: at least qk_rope_head_dim ="
                f" {self.mla.qk_rope_head_dim}"
            )

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> V32Config:
        """Reads the attention's fields of a Hugging Face config.

        Args:
            source: the parsed config, or the path of a `config.json` or of the directory that holds it. Its model_type
                is deepseek_v32 or absent.

        Raises:
            ValueError: as `MLAConfig.from_hf`; or the indexer is another one: layers share what one of them chose
                (index_topk_freq, indexer_types), its rope is interleaved, or an index_ field is unknown.
        """
        fields, where = read_hf_config(source)
        check_v32(fields, where)
        sizes = {name: hf_field(fields, name, int, where) for name in ("index_n_heads", "index_head_dim", "index_topk")}
        return cls(MLAConfig.from_hf(fields if isinstance(source, Mapping) else source), **sizes)
