"""Programs with kernels: lowering them for CUDA, counting what is in them, and comparing what they compute."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops.kernel_call import kernel_call_p
from tsmla_kernels.kernel import Config, Kernel


def ints(x: object) -> jax.Array:
    """An int32 array."""
    return jnp.asarray(x, jnp.int32)


def placed(mesh: Mesh, arrays: Iterable[Any], *specs: P) -> list[jax.Array]:
    """Arrays split over the axes of a mesh; those without a spec are whole on every device."""
    given = list(arrays)
    every = (*specs, *(P(),) * (len(given) - len(specs)))
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, every, strict=True)]


def lower(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **kwargs: Any) -> str:
    """The StableHLO of a call on CUDA, on any machine."""
    # A new function each time: jax remembers what it lowered for the same one.
    jitted = jax.jit(lambda *args, **kwargs: function(*args, **kwargs), donate_argnums=donate)
    return jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).as_text()


def calls(jaxpr: Any) -> int:
    """How many kernels a jaxpr calls."""
    return len(re.findall(r"= tsmla_kernel_call\[", str(jaxpr)))


def kernels(program: Any) -> list[tuple[Kernel, Config]]:
    """The kernels that a jaxpr calls, inner ones included, with their configs, in order."""
    if isinstance(program, tuple | list):
        return [found for each in program for found in kernels(each)]
    found = []
    # From jax 0.11 on the inner one of a closed jaxpr has that name, too, for itself.
    for equation in getattr(getattr(program, "jaxpr", program), "eqns", ()):
        if equation.primitive is kernel_call_p:
            found.append((equation.params["kernel"], equation.params["config"]))
        found += kernels(list(equation.params.values()))
    return found


def primitives(jaxpr: Any) -> list[str]:
    """The names of a jaxpr's primitives, inner jaxprs included."""
    return re.findall(r" = ([a-z]\w*)[\[ ]", str(jaxpr))


def collectives(compiled: Any) -> list[str]:
    """The names of the collectives that a compiled program runs."""
    names = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter"
    return re.findall(rf"= \S+ ({names})\(", compiled.as_text())


def assert_same(got: Any, want: Any) -> None:
    """(out, lse) of two programs that compute in float32 and round once to bfloat16, in orders that may differ."""
    np.testing.assert_allclose(np.float32(got[0]), np.float32(want[0]), atol=1e-5, rtol=2**-7)
    np.testing.assert_allclose(np.float32(got[1]), np.float32(want[1]), atol=1e-5, rtol=1e-5)


def assert_same_lse(got: np.ndarray, want: np.ndarray, atol: float) -> None:
    """Two lses, -inf in the same rows."""
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    seen = ~np.isneginf(want)
    np.testing.assert_allclose(got[seen], want[seen], rtol=1e-6, atol=atol)
