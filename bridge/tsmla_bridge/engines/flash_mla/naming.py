"""This project's operations under flash_mla's names: their errors name the arguments of the package's functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tsmla_bridge.runtime.tensors import TENSOR
from tsmla_kernels import contract

DECODE = {
    "latent_dim": "head_dim_v",
    "kv_cache": "k_cache",
    "compressed_kv_cache": "extra_k_cache",
    "block_tables": "block_table",
    "seq_lens": "cache_seqlens",
    "lengths": "topk_length",
    "sinks": "attn_sink",
    "q_scale": "descale_q",
    "kv_scale": "descale_k",
    "batch_invariant": "enable_batch_invariant",
}
PREFILL = {
    "latent_dim": "d_v",
    "kv_cache": "kv",
    "softmax_scale": "sm_scale",
    "lengths": "topk_length",
    "sinks": "attn_sink",
}
_ARGUMENT = re.compile(
    r"^(lengths|sinks)(?=:)"
    r"|\b(latent_dim|kv_cache|compressed_kv_cache|block_tables|seq_lens|softmax_scale|q_scale|kv_scale|batch_invariant)\b"
)
"""An argument of this project's operations in an error's text. `lengths` and `sinks`, which are also plain words, count
only at the start of the text."""


def given_tensors(required: Mapping[str, Any], optional: Mapping[str, Any]) -> dict[str, Tensor]:
    """The optional arguments that are not None. TypeError unless these and all required ones are tensors."""
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {**required, **given}.items():
        if not isinstance(value, Tensor):
            raise contract.not_an_array(name, value, TENSOR)
    return given


def call(operation: Callable[..., Any], names: Mapping[str, str], *arguments: Any, **options: Any) -> Any:
    """The result of operation(*arguments, **options), whose errors name the arguments as the package does. `names`:
    from the operation's names to the package's."""
    try:
        return operation(*arguments, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        said = _ARGUMENT.sub(lambda name: names.get(name[0], name[0]), str(error))
        kind = next(kind for kind in (TypeError, ValueError, NotImplementedError) if isinstance(error, kind))
        raise kind(said) from None
