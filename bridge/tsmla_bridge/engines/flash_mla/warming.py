"""Sparse attention whose first call of a kind also loads the kernels of later ones.

The package flash_mla has no function by which an engine could load kernels ahead. Which kernel serves a call depends on
its number of tokens, and a request must not wait for the compiler because it is the first of its length.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tsmla_bridge.ops import plans
from tsmla_bridge.ops import sparse_mla as op
from tsmla_bridge.ops.sparse_inputs import SparseInputs
from tsmla_bridge.ops.sparse_plans import SparseOptions, make_plan
from tsmla_bridge.runtime import loaded_kernels

_loaded: set[tuple[Any, ...]] = set()
"""The kinds of calls whose kernels are loaded."""


def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    *,
    softmax_scale: float,
    sinks: torch.Tensor | None,
    compressed_kv_cache: torch.Tensor | None = None,
    latent_dim: int = 512,
    batch_invariant: bool = False,
    **pages: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the operation sparse_mla.

    pages: the operation's window, and the sizes and spans of its caches' pages.
    """
    results: Any = op.sparse_mla(  # type: ignore[call-overload]
        q,
        kv_cache,
        indices,
        lengths,
        softmax_scale=softmax_scale,
        sinks=sinks,
        compressed_kv_cache=compressed_kv_cache,
        latent_dim=latent_dim,
        batch_invariant=batch_invariant,
        return_lse=True,
        **pages,
    )
    if not torch.compiler.is_compiling():
        inputs = SparseInputs(q, kv_cache, compressed_kv_cache, indices, lengths, sinks)
        empty = dict.fromkeys(SparseOptions._fields)
        static = {"latent_dim": latent_dim, "batch_invariant": batch_invariant, "form": "auto"}
        options = empty | pages | static | {"deterministic": False, "max_logits": False}
        _load_other_sizes(inputs, SparseOptions(**options))  # type: ignore[arg-type]
    out, lse = results
    return out, lse


def _load_other_sizes(inputs: SparseInputs, options: SparseOptions) -> None:
    """Load the kernels of calls like this one with fewer and more tokens, once. In a CUDA graph's capture nothing is
    loaded: engines run a batch before they capture it."""
    q = inputs.q
    given = [None if tensor is None else (tensor.dtype, tensor.shape[1:]) for tensor in inputs]
    kind = (q.device, options, *given)
    if kind in _loaded or loaded_kernels.is_by_definition(None, q.device):
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    spec = plans.find(inputs, options, make_plan).spec
    for num_tokens in op.WARM_TOKENS:
        like = dataclasses.replace(spec, num_tokens=num_tokens)
        op.warm(like, q.get_device(), lengths=inputs.lengths is not None, sinks=inputs.sinks is not None)
    _loaded.add(kind)
