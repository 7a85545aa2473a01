"""The peers of prefill_backward.py: each makes a function that runs the backward pass alone and returns the gradients.

All take torch tensors of packed requests: q and k [T, H, 192], v, out and d_out [T, H, 128], lse [T, H], in `Saved`.
cuDNN (through torch and through jax's private operation) and tokamax take requests of one length alone, and
FlashAttention-4 takes ragged ones too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Gradients = Callable[[], Any]
"""Runs a backward pass; returns the gradients of q, k and v in any form that `as_torch` takes."""


@dataclass(frozen=True)
class Saved:
    """What a backward pass is computed from. lens are the tokens of each request."""

    lens: tuple[int, ...]
    scale: float
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    d_out: Any
    offsets: Any

    def of_one_request(self) -> tuple[Any, ...]:
        """q, k, v and d_out as [1, T, H, width]."""
        if len(self.lens) != 1:
            raise ValueError("ragged requests are not taken")
        return tuple(x[None] for x in (self.q, self.k, self.v, self.d_out))


def cudnn(saved: Saved) -> Gradients:
    """cuDNN through torch's scaled_dot_product_attention."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, d_out = (x.detach().transpose(1, 2) for x in saved.of_one_request())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, scale=saved.scale)

    def run() -> list[Any]:
        gradients = torch.autograd.grad(out, inputs, d_out, retain_graph=True)
        return [x.transpose(1, 2) for x in gradients]

    return run


@contextmanager
def _deterministic() -> Iterator[None]:
    """torch asks for deterministic algorithms. warn_only: otherwise torch refuses cuDNN, whose graph takes the flag."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def cudnn_deterministic(saved: Saved) -> Gradients:
    """`cudnn` where torch asks for deterministic algorithms."""
    with _deterministic():
        run = cudnn(saved)

    def deterministic() -> Any:
        with _deterministic():
            return run()

    return deterministic


def fa4(saved: Saved, deterministic: bool = False) -> Gradients:
    """FlashAttention-4 (flash_attn.cute) on our out and lse."""
    from flash_attn.cute.interface import _flash_attn_bwd  # type: ignore[import-not-found]

    options = {"softmax_scale": saved.scale, "causal": True, "deterministic": deterministic}
    if len(saved.lens) == 1:
        q, k, v, d_out = saved.of_one_request()
        lse = saved.lse.t().contiguous()[None]
        return lambda: _flash_attn_bwd(q, k, v, saved.out[None], d_out, lse, **options)[:3]
    lse, offsets, longest = saved.lse.t().contiguous(), saved.offsets, max(saved.lens)
    options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda: _flash_attn_bwd(saved.q, saved.k, saved.v, saved.out, saved.d_out, lse, **options)[:3]


fa4_deterministic = functools.partial(fa4, deterministic=True)


def _through_jax(saved: Saved, attend: Callable[..., Any], **compiler_options: Any) -> Gradients:
    """The backward pass of a jax function of [1, T, H, width] arrays, jitted apart from its forward pass."""
    import jax
    import jax.numpy as jnp

    *inputs, d_out = (jnp.from_dlpack(x.contiguous()) for x in saved.of_one_request())
    derivative = jax.jit(functools.partial(jax.vjp, attend))(*inputs)[1]
    run = jax.jit(lambda derivative, d_out: derivative(d_out), compiler_options=compiler_options)
    return lambda: run(derivative, d_out)


def cudnn_jax(saved: Saved, **compiler_options: Any) -> Gradients:
    """cuDNN through jax's private operation: the public one refuses these head dims."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    causal = fused.MaskType.CAUSAL
    attend = functools.partial(fused.dot_product_attention, scale=saved.scale, mask_type=causal, qkv_layout="BTNH")
    return _through_jax(saved, attend, **compiler_options)


cudnn_jax_deterministic = functools.partial(cudnn_jax, xla_gpu_deterministic_ops=True)


def tokamax(saved: Saved) -> Gradients:
    """tokamax's Pallas kernels for Hopper (implementation "mosaic")."""
    from tokamax import dot_product_attention  # type: ignore[import-not-found]

    attend = functools.partial(dot_product_attention, scale=saved.scale, is_causal=True, implementation="mosaic")
    return _through_jax(saved, attend)


def tsmla_jit(saved: Saved) -> Gradients:
    """Ours through jax.jit, as the other peers of jax are timed."""
    import jax.numpy as jnp

    import tsmla_jax

    offsets, longest = jnp.from_dlpack(saved.offsets), max(saved.lens)
    options: dict[str, Any] = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    options |= {"max_q_len": longest, "max_kv_len": longest, "softmax_scale": saved.scale, "implementation": "cute"}

    def attend(q: Any, k: Any, v: Any) -> Any:
        return tsmla_jax.mla_prefill(q[0], k[0], v[0], **options)[None]

    return _through_jax(saved, attend)


PEERS: dict[str, Callable[[Saved], Gradients]] = {
    "cudnn": cudnn,
    "cudnn_deterministic": cudnn_deterministic,
    "cudnn_jax": cudnn_jax,
    "cudnn_jax_deterministic": cudnn_jax_deterministic,
    "fa4": fa4,
    "fa4_deterministic": fa4_deterministic,
    "tokamax": tokamax,
    "tsmla_jit": tsmla_jit,
}

IN_JAX = ("cudnn_jax", "cudnn_jax_deterministic", "tokamax", "tsmla_jit")
"""Peers that run on jax's stream: they are timed by the host's clock."""


def as_torch(gradients: Any) -> list[Any]:
    """The gradients of q, k and v as torch tensors [T, H, width]."""
    import torch

    tensors = [x if isinstance(x, torch.Tensor) else torch.from_dlpack(x) for x in gradients]
    return [x.reshape(-1, *x.shape[-2:]) for x in tensors]
