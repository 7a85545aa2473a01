"""JAX functions on torch tensors, and the arrays of each library as the other's: by DLPack, without a copy.

Both directions are ordered on the device: work launched on torch's current stream before an array is handed over is
done before jax reads it, and the other way round. For arrays on a GPU the host does not wait. jax is imported at the
first use.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from tsmla_bridge import operators

if TYPE_CHECKING:
    import jax


_WIDE = (torch.int64, torch.uint64, torch.float64, torch.complex128)
"""The dtypes that jax has only under jax_enable_x64; it would narrow them, to a copy."""


_NARROW = ("int1", "uint1", "int2", "uint2", "int4", "uint4")
"""The integers of jax below 8 bits, by name. jax doesn't hand those of 2 and 4 bits over, and torch would take those of
one bit for bool."""


def _jax() -> ModuleType:
    """The module jax. ImportError that says how to install it, where it isn't installed."""
    try:
        return importlib.import_module("jax")
    except ImportError as error:
        raise ImportError(f"arrays between jax and torch need the package jax: pip install jax ({error})") from None


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A torch tensor's memory as a jax array: same device, shape and dtype, float8_e4m3fn and bfloat16 included.

    jax takes arrays as constant: until it has read this one, write to the tensor only in work that is ordered after it
    (jax_function does that).

    Args:
      tensor: contiguous, of any shape; a dtype that jax has without jax_enable_x64, or with it where it is on.

    Raises:
      TypeError: it is no torch tensor.
      ValueError: it isn't contiguous, its values are in no memory of its own (a tensor on "meta", a fake tensor), it is
        a lazily negated or conjugated view, jax would have to copy it, or jax has its dtype only under jax_enable_x64,
        which is off.
      RuntimeError, BufferError: jax or DLPack has no such device or dtype.
      ImportError: jax isn't installed.
    """
    jax = _jax()
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor: got {type(tensor).__name__}; legal: a torch.Tensor (jax.numpy.asarray takes others)")
    kind = type(tensor)
    # A fake tensor, say, whose values are in no memory: DLPack would hand over whatever lies at its address.
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ValueError(f"tensor: got a {kind.__name__}; legal: a tensor whose own memory holds its values")
    if tensor.dtype in _WIDE and not jax.config.read("jax_enable_x64"):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"tensor: got dtype {dtype}; legal: one that jax has without jax_enable_x64 (.to() converts)")
    if not tensor.is_contiguous():
        raise ValueError(
            f"tensor: got strides {list(tensor.stride())} of shape {list(tensor.shape)}; legal: a contiguous one"
        )
    if tensor.is_neg() or tensor.is_conj():  # DLPack has no such bit: jax would read the numbers in memory
        raise ValueError(
            "tensor: got a view that negates or conjugates when it is read; legal: its .resolve_neg() and "
            ".resolve_conj()"
        )
    array = jax.dlpack.from_dlpack(tensor.detach(), copy=False)
    if tensor.numel() and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise ValueError(f"tensor: got memory at {tensor.data_ptr():#x}; legal: aligned memory (.clone() gives such)")
    return array


def to_torch(array: jax.Array) -> torch.Tensor:
    """A jax array's memory as a torch tensor, ready on torch's current stream. Not to be written to: jax takes its
    arrays as constant.

    Args:
      array: of any shape and of a dtype that torch takes through DLPack, on one device.

    Raises:
      TypeError: it is no jax array, or one of keys or of integers of 1, 2 or 4 bits.
      BufferError: it has another dtype that torch doesn't take.
      ValueError: it lies on several devices.
      ImportError: jax isn't installed.
    """
    jax = _jax()
    if not isinstance(array, jax.Array):
        raise TypeError(f"array: got {type(array).__name__}; legal: a jax.Array")
    kind = array.dtype
    if jax.dtypes.issubdtype(kind, jax.dtypes.extended) or kind.name in _NARROW:
        raise TypeError(f"array: got dtype {kind}; legal: one that torch takes through DLPack")
    if len(array.devices()) != 1:
        raise ValueError(f"array: got one on {len(array.devices())} devices; legal: on one")
    return torch.from_dlpack(array)


def jax_function(function: Callable[..., Any], **jit_options: Any) -> Callable[..., Any]:
    """`function` of jax arrays as a function of torch tensors, compiled by jax.jit with `jit_options`.

    Arguments and results may be any pytrees; tensors in the arguments become arrays and arrays in the results tensors,
    without copies. Work on torch's current stream before the call is done before jax reads the tensors, and work after
    the call begins when all results are there, so the tensors may be written to again at once.

    Args:
      function: takes and returns pytrees of jax arrays.
      jit_options: the options of jax.jit: static_argnames, donate_argnums and others.

    Raises:
      ImportError: at once, if jax isn't installed.
      TypeError, ValueError, RuntimeError, BufferError: at a call, as to_jax and to_torch say.
      ValueError: at a call, a tensor requires a derivative, in reverse or in forward mode, which does not pass through
        jax; torch.no_grad() allows the call.
    """
    jax = _jax()
    compiled = jax.jit(function, **jit_options)

    @functools.wraps(function)
    def on_tensors(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        if operators.asks_for_derivative(*leaves):
            raise ValueError(
                "got a tensor that requires a derivative; jax_function has none: call it under torch.no_grad()"
            )
        arrays = [to_jax(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(structure, arrays)
        results = compiled(*args, **kwargs)
        return jax.tree.map(lambda leaf: to_torch(leaf) if isinstance(leaf, jax.Array) else leaf, results)

    return on_tensors
