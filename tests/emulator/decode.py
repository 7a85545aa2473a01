"""What the decode kernel computes, on a CPU: the kernel's own operands, as the wrapper passes them, through the
reference.

With `emulated`, which makes it the primitive's lowering for CPUs, everything around the kernel runs here: flattening,
folding, partitioning. Rows that the kernel doesn't write stay NaN, so that a test sees who relies on them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from tsmla_jax.ops.inputs import Scales
from tsmla_jax.ops.kernel_call import _elsewhere, kernel_call_p
from tsmla_jax.ops.mla_decode import reference
from tsmla_jax.ops.ragged import row_owner
from tsmla_kernels import contract
from tsmla_kernels.kernel import Kernel
from tsmla_kernels.sm90.decode.config import DecodeConfig


def emulate(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    *others: jax.Array,
    kernel: Kernel,
    config: DecodeConfig,
    arch: str,
    result_shapes: tuple[tuple[int, ...], ...],
) -> list[jax.Array]:
    *visible_lens, scales = others
    tokens = q.shape[0] // config.num_heads
    spec = contract.DecodeSpec(
        batch=block_tables.shape[0],
        total_q_len=tokens,
        max_q_len=config.max_q_len,
        num_heads=config.num_heads,
        latent_dim=config.latent_dim,
        rope_dim=config.rope_dim,
        num_pages=kv_cache.shape[0],
        page_size=config.page_size,
        max_pages=block_tables.shape[1],
        q_dtype=config.dtype,
        kv_dtype=config.cache_dtype,
        ragged=config.ragged,
        causal=config.causal,
        batch_invariant=config.batch_invariant,
        visible_lens=config.visible_lens,
    )
    shape = (tokens,) if config.ragged else (spec.batch, config.max_q_len)
    out, lse = reference.mla_decode(
        q.reshape(*shape, config.num_heads, config.head_dim),
        kv_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q if config.ragged else None,
        visible_lens[0].reshape(shape) if config.visible_lens else None,
        Scales(scales[0]),
        spec=spec,
    )
    out = (out.astype(jnp.float32) * scales[1]).astype(config.out_dtype)
    if config.ragged:
        _, position, owned = row_owner(cu_seqlens_q, tokens)
        written = owned & (position < config.max_q_len)
        out = jnp.where(written[:, None, None], out, jnp.nan)
        lse = jnp.where(written[:, None], lse, jnp.nan)
    operands = [operand for operand in kernel.operands(config) if operand.output]
    workspaces: list[Any] = [
        jnp.full(shape, 123, operand.dtype) for operand, shape in zip(operands[2:], result_shapes[2:], strict=True)
    ]
    return [out.reshape(result_shapes[0]), lse.reshape(result_shapes[1]), *workspaces]


_emulator: Callable[..., Sequence[jax.Array]] | None = None


def _lowering(*arrays: jax.Array, **params: Any) -> Sequence[jax.Array]:
    return (_emulator or _elsewhere)(*arrays, **params)


@contextlib.contextmanager
def emulated(*traced: Callable[..., Any], by: Callable[..., Sequence[jax.Array]] = emulate) -> Iterator[None]:
    """The primitive's lowering for CPUs in this process is `by`; afterwards CPUs are refused again. `traced` are cached
    functions that keep programs, which are forgotten before and after, since the lowering is in them."""
    global _emulator
    _emulator = by
    mlir.register_lowering(kernel_call_p, mlir.lower_fun(_lowering, multiple_results=True), platform="cpu")
    for function in traced:
        function.cache_clear()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _emulator = None
        for function in traced:
            function.cache_clear()  # type: ignore[attr-defined]
