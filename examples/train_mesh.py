"""Train a small MLA transformer on a mesh: parameters split over devices (as FSDP or ZeRO-3), tokens over others.

    JAX_NUM_CPU_DEVICES=4 python examples/train_mesh.py --fsdp 2 --context 2

The mesh has two axes. Devices along "fsdp" have texts of their own. Devices along "context" share the texts: each has a
part of the tokens, and MLA exchanges only the latents, 576 numbers a token for all heads of DeepSeek, from which each
device expands its keys and values. Each device of the mesh holds a part of every parameter and of the optimizer's
state, where an axis can be split evenly. It gathers a parameter where it is used, and the gradient is summed and split
again by the same collective, transposed.

The losses are compared, step by step, with those of the same batches on one device. Needs `pip install '.[flax]'` in a
clone, which brings optax.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tsmla_jax.nn import MLAConfig, context_parallel, functional, init_params
from tsmla_jax.nn.mla.rope import rope_cos_sin

FSDP, CONTEXT = "fsdp", "context"
VOCABULARY, PATTERN = 32, 2

Params = dict[str, Any]


class Shape(NamedTuple):
    """The sizes of a model and of its batches: `rows` times `tokens` tokens of packed texts, at most max_len in a
    text."""

    width: int = 128
    heads: int = 2
    layers: int = 2
    rows: int = 2
    tokens: int = 256
    max_len: int = 96

    @property
    def attention(self) -> MLAConfig:
        """Head dims of DeepSeek, for which there are kernels."""
        return MLAConfig(
            hidden_size=self.width, num_attention_heads=self.heads, kv_lora_rank=self.width // 2,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        )  # fmt: skip


class Texts(NamedTuple):
    """A batch: tokens [R, T] of packed texts, positions in a text and the tokens that follow [R, T] (-1 where none is
    asked for), and where each text starts [R, B + 1]."""

    tokens: Any
    positions: Any
    following: Any
    starts: Any


TEXTS = Texts(P(FSDP, CONTEXT), P(FSDP, CONTEXT), P(FSDP, CONTEXT), P(FSDP))
"""How a batch is split: rows over one axis, tokens over the other."""


def make_mesh(fsdp: int, context: int) -> Mesh:
    """The mesh of the first fsdp * context devices."""
    devices = jax.devices()[: fsdp * context]
    return jax.make_mesh((fsdp, context), (FSDP, CONTEXT), axis_types=(AxisType.Auto,) * 2, devices=devices)


def split_axis(shape: tuple[int, ...], parts: int) -> int | None:
    """The first axis that `parts` devices can split evenly; None if there is none: each device then has the whole
    parameter."""
    return next((axis for axis, size in enumerate(shape) if size % parts == 0), None)


def specs_of(params: Any, mesh: Mesh) -> Any:
    """The PartitionSpec of each parameter, or of anything else of its shape: split over all devices of the mesh."""

    def spec(x: Any) -> P:
        axis = split_axis(x.shape, mesh.size)
        return P() if axis is None else P(*(None,) * axis, (FSDP, CONTEXT))

    return jax.tree.map(spec, params)


def whole(part: jax.Array, spec: P) -> jax.Array:
    """A parameter from its parts. The transpose of the collective sums a gradient and gives each device its part."""
    axis = len(spec) - 1
    return part if axis < 0 else lax.all_gather(part, (FSDP, CONTEXT), axis=axis, tiled=True)


def init(shape: Shape) -> Params:
    """Random parameters."""
    keys = iter(jax.random.split(jax.random.key(0), 2 + 3 * shape.layers))

    def normal(*size: int) -> jax.Array:
        return jax.random.normal(next(keys), size) * size[0] ** -0.5

    layers = [
        {
            "attention": dict(init_params(next(keys), shape.attention)),
            "up": normal(shape.width, 4 * shape.width),
            "down": normal(4 * shape.width, shape.width),
        }
        for _ in range(shape.layers)
    ]
    return {"embedding": normal(VOCABULARY, shape.width), "layers": layers, "head": normal(shape.width, VOCABULARY)}


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


class Requests(NamedTuple):
    """The requests of `mla_prefill_kv` on this device: where their queries and their keys begin, [requests + 1]."""

    queries: jax.Array
    keys: jax.Array


def requests_of(starts: jax.Array, tokens: int) -> Requests:
    """The requests of this device's part of packed texts that start at `starts` [R, B + 1] in rows of `tokens` tokens.

    A row's texts are followed by two requests more: tokens of no text, which see nothing, and keys that no token here
    sees. So all rows are one call, in which each row has tokens / N queries and `tokens` keys.
    """
    queries, keys = context_parallel.own_offsets(starts, tokens, CONTEXT)
    each, rows = tokens // lax.axis_size(CONTEXT), jnp.arange(starts.shape[0], dtype=jnp.int32)[:, None]
    last = jnp.full_like(rows, each)
    queries, keys = (
        jnp.append((jnp.append(x, end, axis=1) + rows * count).reshape(-1), jnp.int32(count * starts.shape[0]))
        for x, end, count in ((queries, last, each), (keys, keys[:, -1:], tokens))
    )
    return Requests(queries, keys)


def attend(params: Params, shape: Shape, x: jax.Array, positions: jax.Array, requests: Requests) -> jax.Array:
    """Attention of this device's tokens x [R T / N, E] to all tokens of their texts: each of N devices along CONTEXT
    has latents of its own tokens, which are gathered."""
    config, rows = shape.attention, len(x) * lax.axis_size(CONTEXT) // shape.tokens
    cos, sin = rope_cos_sin(config, positions)
    own = functional.project_latent(params, config, x, cos, sin)
    latent, k_rope = (
        lax.all_gather(part.reshape(rows, -1, part.shape[1]), CONTEXT, axis=1, tiled=True).reshape(-1, part.shape[1])
        for part in own
    )
    out = tsmla_jax.mla_prefill_kv(
        jnp.concatenate(functional.project_q(params, config, x, cos, sin), axis=-1),
        functional.expand_joint_kv(params, latent),
        k_rope,
        cu_seqlens_q=requests.queries,
        cu_seqlens_kv=requests.keys,
        max_q_len=len(x) // rows,
        max_kv_len=shape.tokens,
        softmax_scale=config.softmax_scale,
    )
    return functional.project_out(params, config, out)


def loss_of(parts: Params, specs: Any, shape: Shape, dtype: Any, texts: Texts) -> jax.Array:
    """The mean cross entropy over all devices' tokens, of this device's parts of the parameters and of the batch."""

    def gathered(parts: Any, specs: Any) -> Any:
        return jax.tree.map(lambda part, spec: whole(part.astype(dtype), spec), parts, specs)

    def layer(specs: Any, parts: Params, x: jax.Array, positions: jax.Array, requests: Requests) -> jax.Array:
        params = gathered(parts, specs)
        x = x + attend(params["attention"], shape, norm(x), positions, requests)
        return x + jax.nn.silu(norm(x) @ params["up"]) @ params["down"]

    positions, requests = texts.positions.reshape(-1), requests_of(texts.starts, shape.tokens)
    x = gathered(parts["embedding"], specs["embedding"])[texts.tokens.reshape(-1)]
    for each, spec in zip(parts["layers"], specs["layers"], strict=True):
        # Gathered parameters are dropped behind a layer, and gathered again for its gradient.
        x = jax.checkpoint(functools.partial(layer, spec))(each, x, positions, requests)
    logits, following = (
        (norm(x) @ gathered(parts["head"], specs["head"])).astype(jnp.float32),
        texts.following.reshape(-1),
    )
    asked = following >= 0
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(following, 0))
    total, count = (lax.psum(x, (FSDP, CONTEXT)) for x in (jnp.where(asked, each, 0).sum(), asked.sum()))
    return total / count


def batches(shape: Shape, steps: int) -> Iterator[Texts]:
    """Packed texts that repeat a random pattern of tokens. Tokens of a row after its last text belong to none."""
    rng = np.random.default_rng(0)
    texts = 2 * shape.tokens // shape.max_len + 1
    for _ in range(steps):
        made = []
        for _ in range(shape.rows):
            lens = rng.integers(PATTERN + 1, shape.max_len + 1, texts)
            starts = np.concatenate([[0], np.cumsum(lens)]).clip(max=shape.tokens).astype(np.int32)
            tokens, positions, following = (np.full(shape.tokens, fill, np.int32) for fill in (0, 0, -1))
            for first, stop in itertools.pairwise(starts):
                tokens[first:stop] = np.resize(rng.integers(0, VOCABULARY, PATTERN), stop - first)
                positions[first:stop] = np.arange(stop - first)
                following[first + PATTERN - 1 : stop - 1] = tokens[first + PATTERN : stop]
            made.append(Texts(tokens, positions, following, starts))
        yield Texts(*(np.stack(parts) for parts in zip(*made, strict=True)))


class Run(NamedTuple):
    """The losses of a training, the bytes of parameters and optimizer state on one device, and the seconds of a step
    (the median over the second half)."""

    losses: list[float]
    state_bytes: int
    seconds: float


def train(mesh: Mesh, shape: Shape, steps: int, dtype: Any) -> Run:
    """Train on a mesh. The products are in `dtype`, parameters and optimizer in float32."""
    optimizer = optax.adam(3e-3)
    params = init(shape)
    specs = specs_of(params, mesh)
    state = optimizer.init(params)
    state_specs = specs_of(state, mesh)

    def on_device(params: Params, state: Any, texts: Texts) -> tuple[Params, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss_of)(params, specs, shape, dtype, texts)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=(specs, state_specs, TEXTS), out_specs=(specs, state_specs, P())),
        donate_argnums=(0, 1),
    )

    def placed(tree: Any, specs: Any) -> Any:
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
        return jax.device_put(tree, shardings)

    params, state = placed(params, specs), placed(state, state_specs)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((params, state)))
    losses, seconds = [], []
    for texts in batches(shape, steps):
        begin = time.perf_counter()
        params, state, value = step(params, state, placed(texts, TEXTS))
        losses.append(float(value))
        seconds.append(time.perf_counter() - begin)
    return Run(losses, held, float(np.median(seconds[steps // 2 :])))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="train a small MLA transformer on a mesh")
    parser.add_argument("--fsdp", type=int, default=2, help="devices that split rows")
    parser.add_argument("--context", type=int, default=1, help="devices that split the tokens of a row")
    parser.add_argument("--steps", type=int, default=40)
    for name, size in Shape()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args(arguments)
    for name, least in ({name: 1 for name in vars(options)} | {"max_len": PATTERN + 1}).items():
        if (found := getattr(options, name)) < least:
            parser.error(f"--{name}: got {found}; legal: at least {least}")
    shape = Shape(**{name: getattr(options, name) for name in Shape._fields})
    for name, size, axis, parts in (
        ("rows", shape.rows, "fsdp", options.fsdp), ("tokens", shape.tokens, "context", options.context),
    ):  # fmt: skip
        if size % parts:
            parser.error(f"--{name}: got {size}; legal: a multiple of --{axis}, {parts}")
    if (wanted := options.fsdp * options.context) > (count := len(jax.devices())):
        parser.error(
            f"--fsdp, --context: got {wanted} devices; legal: at most {count}, which jax has (JAX_NUM_CPU_DEVICES=4"
            " makes a CPU four simulated ones)"
        )
    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    print(f"{jax.devices()[0].device_kind}, {jnp.dtype(dtype).name}, fsdp {options.fsdp} x context {options.context}")
    run, alone = (train(make_mesh(*sizes), shape, options.steps, dtype) for sizes in
                  ((options.fsdp, options.context), (1, 1)))  # fmt: skip
    apart = np.abs(np.subtract(run.losses, alone.losses)) / alone.losses[0]
    for i in sorted({*range(0, options.steps, max(1, options.steps // 8)), options.steps - 1}):
        print(f"step {i:3d}  loss {run.losses[i]:.4f}  one device {alone.losses[i]:.4f}  apart {apart[i]:.1e}")
    tokens = shape.rows * shape.tokens
    print(f"a device holds {run.state_bytes / alone.state_bytes:.2f} of the parameters and the optimizer's state")
    print(f"tokens a second: {tokens / run.seconds:,.0f}, on one device {tokens / alone.seconds:,.0f}")
    print(f"loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}; at most {apart.max():.1e} of the first from one device's")
    if not apart.max() < (0.05 if on_gpu else 1e-3):
        raise SystemExit("the mesh does not train as one device does")


if __name__ == "__main__":
    main()
