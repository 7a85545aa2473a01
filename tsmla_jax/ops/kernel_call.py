"""Launching compiled CuTe DSL kernels from jax: one primitive for all of them.

The primitive carries the kernel's record and config, not its code. Lowering a program for CUDA looks the object up in
the cache on disk, or compiles it. The lowered program holds the DSL runtime's own custom call with the object inside,
so an exported program needs only `register_custom_calls()` of this package to run. With a warm cache cutlass is never
imported.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import mlir

from tsmla_jax.ops import device
from tsmla_jax.ops.loops import carry
from tsmla_kernels import object_cache
from tsmla_kernels.kernel import Config, Kernel

kernel_call_p = jax.extend.core.Primitive("tsmla_kernel_call")
kernel_call_p.multiple_results = True


def kernel_call(
    kernel: Kernel, config: Config, inputs: Sequence[jax.Array], result_shapes: Sequence[tuple[Any, ...]], *, arch: str
) -> list[jax.Array]:
    """Run `kernel` for `config` on `inputs`; the results are its output operands, workspaces included.

    Args:
      inputs: the kernel's input operands, in order. result_shapes: the shapes of the kernel's outputs, in order.
      arch: the architecture to compile for, which must be one of the kernel's architectures.

    Raises ValueError if an array's shape or dtype is not that of the kernel's operand, or an axis is too long for it.
    """
    expected, results = _split(kernel, config)
    for operand, array in zip(expected, inputs, strict=True):
        operand.check(array.shape, jnp.dtype(array.dtype).name)
        operand.check_sizes(array.shape)
    for operand, shape in zip(results, result_shapes, strict=True):
        operand.check(shape, operand.dtype)
        operand.check_sizes(shape)
    # Under shard_map some operands vary over more mesh axes than others; a custom call needs all to vary over the same
    # axes.
    outputs: list[jax.Array] = kernel_call_p.bind(
        *(carry(array, *inputs) for array in inputs),
        kernel=kernel,
        config=config,
        arch=arch,
        result_shapes=tuple(map(tuple, result_shapes)),
    )
    return [carry(array, *inputs) for array in outputs]


@kernel_call_p.def_abstract_eval
def _abstract(
    *_: Any, kernel: Kernel, config: Config, arch: str, result_shapes: tuple[tuple[Any, ...], ...]
) -> list[Any]:
    return [
        jax.core.ShapedArray(shape, jnp.dtype(operand.dtype))
        for operand, shape in zip(_split(kernel, config)[1], result_shapes, strict=True)
    ]


@kernel_call_p.def_impl
def _impl(*arrays: jax.Array, **params: Any) -> list[jax.Array]:
    return _jitted(*arrays, **params)


@functools.partial(jax.jit, static_argnames=("kernel", "config", "arch", "result_shapes"))
def _jitted(*arrays: jax.Array, **params: Any) -> list[jax.Array]:
    return kernel_call_p.bind(*arrays, **params)


def _custom_call(
    *arrays: jax.Array, kernel: Kernel, config: Config, arch: str, result_shapes: tuple[tuple[Any, ...], ...]
) -> Sequence[jax.Array]:
    module, key = _module(kernel, config, arch)
    if device.gpu() is not None:
        device.register_custom_calls()
    inputs, outputs = _split(kernel, config)
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(operand.dtype))
        for operand, shape in zip(outputs, result_shapes, strict=True)
    ]
    names = [operand.name for operand in inputs]
    aliases = {names.index(operand.alias): i for i, operand in enumerate(outputs) if operand.alias is not None}
    call = jax.ffi.ffi_call(device.TARGET, structs, input_output_aliases=aliases)
    return call(*arrays, module=module, key=key)


def _elsewhere(*_: Any, kernel: Kernel, **__: Any) -> Sequence[jax.Array]:
    raise NotImplementedError(
        f"{kernel.name}: implementation='cute' runs only on NVIDIA GPUs, and this program is being lowered for another"
        " platform; implementation='xla' runs anywhere. Programs of several platforms are exported as one for each"
    )


def _split(kernel: Kernel, config: Config) -> tuple[list[Any], list[Any]]:
    """The kernel's input and output operands."""
    operands = kernel.operands(config)
    return [each for each in operands if not each.output], [each for each in operands if each.output]


@functools.cache
def _module(kernel: Kernel, config: Config, arch: str) -> tuple[bytes, bytes]:
    """The object, and the key under which the runtime keeps it loaded."""
    module = object_cache.load_or_compile(kernel, config, arch).module
    return module, hashlib.sha256(module).digest()


mlir.register_lowering(kernel_call_p, mlir.lower_fun(_elsewhere, multiple_results=True))
mlir.register_lowering(kernel_call_p, mlir.lower_fun(_custom_call, multiple_results=True), platform="cuda")
