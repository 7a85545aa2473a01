"""XLA's GPU compiler for cards that are not here: `python -m tests.jax.gpu_compiler CARD` compiles products of layers.

It needs the packages of jax's CUDA plug-in and no GPU. Each line it prints is the name of a product and "ok", or the
compiler's error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Card(NamedTuple):
    """What the compiler asks of a GPU: its compute capability, KiB of shared memory on a multiprocessor, and that many
    multiprocessors, of so many threads."""

    capability: tuple[int, int]
    shared: int
    multiprocessors: int
    threads: int


CARDS = {
    "A100": Card((8, 0), 164, 108, 2048),
    "A10": Card((8, 6), 100, 72, 1536),
    "L40S": Card((8, 9), 100, 142, 1536),
    "H100": Card((9, 0), 228, 132, 2048),
}


def device_of(card: Card) -> Any:
    """A device of jax's that stands for the card."""
    from jax.experimental import topologies

    (major, minor), shared, multiprocessors, threads = card
    target = f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
        shared_memory_per_core: {1024 * shared} shared_memory_per_block_optin: {1024 * (shared - 1)}
        threads_per_core_limit: {threads} core_count: {multiprocessors} fpus_per_core: 128
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        memory_bandwidth: 2000000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.7 device_memory_size: 85899345920
        cuda_compute_capability {{ major: {major} minor: {minor} }}
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
      }}
      platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
      device_description_str: "a card"
    """
    return topologies.get_topology_desc("1x1x1", "cuda", target_config=target, topology="1x1x1").devices[0]


def products() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions and the shapes of their arguments: DeepSeek-V2-Lite's experts and a block-scaled matrix, by tokens, and
    batch-invariant products, a norm and a softmax."""
    import jax
    import jax.numpy as jnp

    from tsmla_jax.generate.config import MoEConfig
    from tsmla_jax.generate.moe import mixture_of_experts
    from tsmla_jax.nn import batch_invariant
    from tsmla_jax.nn.products.block_scaled import BlockScaled
    from tsmla_jax.nn.products.linear import linear

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def narrow(*shape: int) -> Any:
        scales = array(jnp.float32, *shape[:-2], *(-(-size // 128) for size in shape[-2:]))
        return BlockScaled(array(jnp.float8_e4m3fn, *shape), scales)

    def wide(*shape: int) -> Any:
        return array(jnp.bfloat16, *shape)

    config, hidden = MoEConfig(64, 6, 1408, 2, "greedy", 1, 1, False, 1.0), 2048

    def experts(params: Any, x: Any, valid: Any, tokens: Any) -> Any:
        return mixture_of_experts(params, x, valid, config, tokens)

    made: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for tokens in (1, 16, 256, 4096):
        x, per_token = wide(tokens, hidden), (array(bool, tokens), array(jnp.int32, tokens))
        for name, weight in (("bf16", wide), ("fp8", narrow)):
            params = {"router": array(jnp.float32, 64, hidden)}
            params |= {"gate_up": weight(66, 2816, hidden), "down": weight(66, hidden, 1408)}
            made[f"experts of {name}, {tokens} tokens"] = experts, (params, x, *per_token)
    for tokens in (4, 16, 128, 256):
        made[f"matrix of fp8, {tokens} tokens"] = linear, (wide(tokens, hidden), narrow(3648, hidden))
    made["batch-invariant product"] = batch_invariant.linear, (wide(128, 11_264), wide(hidden, 11_264))
    heads = wide(128, 16, 512), wide(16, 128, 512)
    made["batch-invariant product of heads"] = batch_invariant.linear_by_heads, heads
    made["batch-invariant norm"] = (
        functools.partial(batch_invariant.rms_norm, eps=1e-6),
        (wide(128, hidden), wide(hidden)),
    )
    made["batch-invariant softmax"] = batch_invariant.log_softmax, (array(jnp.float32, 128, 102_400),)
    return made


def show_gpu(capability: tuple[int, int]) -> None:
    """Let Pallas find a GPU of this compute capability."""
    import jax

    class Gpu:
        """What Pallas asks of the GPU."""

        compute_capability = "{}.{}".format(*capability)

    real = jax.local_devices
    jax.local_devices = lambda *args, backend=None, **named: (
        [Gpu()] if backend == "gpu" else real(*args, backend=backend, **named)
    )
    jax.default_backend = lambda: "gpu"
    with contextlib.suppress(ImportError):  # jax before 0.11 asks the device
        gpu_info: Any = importlib.import_module("jax._src.pallas.triton.gpu_info")
        major, minor = capability
        found = gpu_info.GpuInfo(gpu_version=None, arch_name=f"{major}.{minor}", compute_capability=10 * major + minor)
        gpu_info.get_gpu_info = lambda: found


def main(name: str) -> None:
    card = CARDS[name]
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        "CUTE_DSL_ARCH": "sm_{}{}a".format(*card.capability),
    }
    import jax
    from jax._src import xla_bridge
    from jax.sharding import SingleDeviceSharding

    if "cuda" not in xla_bridge._backend_factories:
        xla_bridge.discover_pjrt_plugins()
    show_gpu(card.capability)
    place = SingleDeviceSharding(device_of(card))
    for product, (function, shapes) in products().items():
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
        try:
            jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
        except jax.errors.JaxRuntimeError as error:
            print(f"{product}: {' '.join(str(error).split())[:300]}", flush=True)
        else:
            print(f"{product}: ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
