"""SGLang's backends of FlashMLA with the heads that a GPU has. FlashMLA's kernels take 64 or 128, so SGLang pads
queries to them; the kernels here take any number, and need not compute the rest.

SGLang's modules are changed when it makes such a backend, not when the plug-in is loaded: they import much, and ask the
GPU, even in processes that have none.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

Create = Callable[[Any], Any]
"""A function that makes the backend of a model runner."""

logger = logging.getLogger(__name__)


def take_own_heads(backends: MutableMapping[str, Create]) -> None:
    """Change SGLang's registry so that its backends don't pad heads. May be called again."""
    for name, unpad in _UNPAD.items():
        create = backends.get(name)
        if create is not None and not hasattr(create, "unpads"):
            backends[name] = _after(unpad, create)


def _after(unpad: Callable[[], None], create: Create) -> Create:
    @functools.wraps(create)
    def made(runner: Any) -> Any:
        try:
            unpad()
        except Exception as error:
            # Another version of SGLang: padded queries give the same results.
            logger.warning("queries stay padded to 64 or 128 heads: %s: %s", type(error).__name__, error)
        return create(runner)

    made.unpads = True  # type: ignore[attr-defined]
    return made


def _unpad_dsa() -> None:
    backend = importlib.import_module("sglang.srt.layers.attention.dsa_backend").DeepseekSparseAttnBackend
    _replace(backend, "_forward_flashmla_kv", _decode)
    _replace(backend, "_forward_flashmla_sparse", _prompt)


def _unpad_v4() -> None:
    layer = importlib.import_module("sglang.srt.models.deepseek_v4").MqaAttentionBase
    _replace(layer, "_kernel_num_heads", _heads_of_v4)


_UNPAD = {"dsa": _unpad_dsa, "dsv4": _unpad_v4}
"""The function that undoes the padding of a backend, by SGLang's name of the backend."""


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Put function(the method that was there, ...) in place of a method; once."""
    original = getattr(owner, name)
    if not hasattr(original, "unpads"):

        @functools.wraps(original)
        def method(*arguments: Any, **named: Any) -> Any:
            return function(original, *arguments, **named)

        method.unpads = True  # type: ignore[attr-defined]
        setattr(owner, name, method)


def _decode(
    original: Callable[..., Any],
    backend: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,
    *others: Any,
    **named: Any,
) -> Any:
    """dsa's decode. It pads queries to flashmla_kv_num_q_heads heads, which is set to the layer's own number."""
    backend.flashmla_kv_num_q_heads = layer.tp_q_head_num
    return original(backend, q_all, kv_cache, v_head_dim, sm_scale, layer, *others, **named)


def _prompt(
    original: Callable[..., Any],
    backend: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    page_table_1: torch.Tensor,
    sm_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """dsa's sparse attention of prompts. As in dsa's own method, topk_length is left out if it has another length
    than the queries."""
    name = "sglang.kernels.ops.attention.flash_mla_interface"
    if importlib.util.find_spec(name) is None:
        name = "sgl_kernel.flash_mla"  # before SGLang 0.5.23
    package = importlib.import_module(name)
    has_lengths = topk_length is not None and len(topk_length) == len(q_all)
    out: torch.Tensor = package.flash_mla_sparse_fwd(
        q=q_all, kv=kv_cache, indices=page_table_1.unsqueeze(1), sm_scale=sm_scale, d_v=v_head_dim,
        attn_sink=attn_sink, topk_length=topk_length if has_lengths else None,
    )[0]  # fmt: skip
    return out


def _heads_of_v4(original: Callable[..., int], layer: Any, num_tokens: int) -> int:
    """The number of heads that a layer's queries have; for DeepSeek-V4.1, whose rows these kernels don't read, SGLang's
    own number."""
    return original(layer, num_tokens) if layer.is_dsv41 else int(layer.n_local_heads)
