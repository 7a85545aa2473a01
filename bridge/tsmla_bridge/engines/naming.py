"""This project's operations under the names of packages that engines import: errors name the packages' arguments."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tsmla_bridge.runtime.tensors import TENSOR
from tsmla_kernels import contract

Names = Mapping[str, str]
"""A package's names of arguments, by this project's names of the same arguments."""

FLASH_MLA_DECODE = {
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
FLASH_MLA_PREFILL = {
    "latent_dim": "d_v",
    "kv_cache": "kv",
    "softmax_scale": "sm_scale",
    "lengths": "topk_length",
    "sinks": "attn_sink",
}
TOKENSPEED_DECODE = {"q": "query", "latent_dim": "kv_lora_rank", "causal": "causal_mask"}
TOKENSPEED_PREFILL = {
    "q": "query",
    "k": "key",
    "v": "value",
    "cu_seqlens_q": "cum_seq_lens_q",
    "cu_seqlens_kv": "cum_seq_lens",
    "max_q_len": "max_seq_len_q",
    "max_kv_len": "max_seq_len",
    "causal": "is_causal",
}

_WORDS = ("lengths", "sinks", "causal")
"""Arguments whose names are also plain words: in an error's text they count only at its start."""

ERRORS = (TypeError, ValueError, NotImplementedError)
"""The classes of errors that name arguments."""


def given_tensors(required: Mapping[str, Any], optional: Mapping[str, Any]) -> dict[str, Tensor]:
    """The optional arguments that are not None. TypeError unless these and all required ones are tensors."""
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {**required, **given}.items():
        if not isinstance(value, Tensor):
            raise contract.not_an_array(name, value, TENSOR)
    return given


def call(operation: Callable[..., Any], names: Names, *arguments: Any, **options: Any) -> Any:
    """The result of operation(*arguments, **options), whose errors name the arguments as the package does."""
    try:
        return operation(*arguments, **options)
    except ERRORS as error:
        raise renamed(error, names) from None


def renamed(error: Exception, names: Names) -> Exception:
    """An error of an operation with the package's names of the arguments."""
    said = _arguments(tuple(names)).sub(lambda name: names[name[0]], str(error))
    return next(kind for kind in ERRORS if isinstance(error, kind))(said)


@functools.cache
def _arguments(names: tuple[str, ...]) -> re.Pattern[str]:
    """The pattern of these arguments in an error's text."""
    words, others = ("|".join(name for name in names if (name in _WORDS) is plain) for plain in (True, False))
    return re.compile(rf"^({words})(?=:)|\b({others})\b")
