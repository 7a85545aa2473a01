"""The programs of a run, and the arrays that they begin with: on one device, or on a mesh.

On a mesh a step is still one program: `step.run_prefill` and `step.run_decode` inside `jax.shard_map`, where each
device has its replica's state, its part of the replica's caches, and its part of the experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.generate import step as steps
from tsmla_jax.generate.caches import CacheLayout, init_cache
from tsmla_jax.generate.config import LayerAttention, ModelConfig
from tsmla_jax.generate.mesh import AXES, EXPERT_SHARDS, REPLICAS, param_specs, put
from tsmla_jax.generate.step import Constants, Drafts, Prompts, State, StepConfig

_DONATED = ("caches", "state")


@dataclass(frozen=True)
class Programs:
    """The programs that an engine runs.

    Attributes:
      prefill, decode: `step.run_prefill` and `step.run_decode`. On a mesh the arrays of all replicas lie one after the
        other along their first axis, and the tokens come back to every device.
      drop_row: `step.drop_row`; its row is an index among the rows of all replicas.
      mesh: None for one device.
    """

    prefill: Callable[..., Any]
    decode: Callable[..., Any]
    drop_row: Callable[[State, Any], State]
    mesh: Mesh | None = None

    def init_caches(self, config: ModelConfig, layout: CacheLayout) -> list[Any]:
        """Empty caches of every layer: on each device those that the layout describes."""
        layers = [config.layer(index).attention for index in range(config.num_layers)]
        if self.mesh is None:
            return [_cache_maker(attention, layout)() for attention in layers]
        return [_maker(self.mesh, P(AXES), init_cache, one, layout)() for one in layers]

    def init_state(self, rows: int, max_pages: int) -> State:
        """A state without texts, with `rows` rows for each replica."""
        if self.mesh is None:
            return steps.init_state(rows, max_pages)
        state: State = _maker(self.mesh, P(REPLICAS), steps.init_state, rows, max_pages)()
        return state

    def put_constants(self, constants: Constants) -> Constants:
        """The constants of a run, put where the programs read them."""
        return constants if self.mesh is None else put(self.mesh, P(), constants)

    def put_work(self, work: Prompts | Drafts) -> Prompts | Drafts:
        """The prompts or drafts of a step, put on the mesh. Without a mesh they stay on the host, from which the call
        of the program copies them; but drafts without tokens are on the device.
        """
        if isinstance(work, Drafts) and not work.tokens.size:
            return _no_drafts(self.mesh, work.lens.size)
        return work if self.mesh is None else put(self.mesh, P(REPLICAS), work)


@functools.cache
def _cache_maker(attention: LayerAttention, layout: CacheLayout) -> Callable[[], Any]:
    """A program that makes one layer's empty caches on one device, by one launch in place of several."""
    return jax.jit(partial(init_cache, attention, layout))


@functools.cache
def _maker(mesh: Mesh, spec: P, make: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """A program that runs make(*arguments) on each device; its results are arrays split over the devices by `spec`."""
    of_device = partial(make, *arguments)
    return jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False))


@functools.cache
def _no_drafts(mesh: Mesh | None, rows: int) -> Drafts:
    """Drafts without tokens, put on the mesh or on the device once, since most decode steps have no drafts: a copy
    before each step would keep the device waiting."""
    none = steps.no_drafts(rows)
    drafts: Drafts = jax.device_put(none) if mesh is None else put(mesh, P(REPLICAS), none)
    return drafts


_drop_row = jax.jit(steps.drop_row, donate_argnames="state")
_whole_steps = Programs(
    jax.jit(steps.run_prefill, static_argnames="config", donate_argnames=_DONATED),
    jax.jit(steps.run_decode, static_argnames="config", donate_argnames=_DONATED),
    _drop_row,
)
_layer_by_layer = Programs(steps.run_prefill, steps.run_decode, _drop_row)


def programs_for(mesh: Mesh | None, at_once: bool) -> Programs:
    """The programs on a mesh, or on one device: a whole step as one program if `at_once`, else layer by layer. All
    engines share them."""
    if mesh is None:
        return _whole_steps if at_once else _layer_by_layer
    return _on_mesh(mesh)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Elements:
    """A pytree whose arrays without elements, such as the drafts of a step without drafts, stay outside of
    `jax.shard_map`: XLA's partitioner in jaxlib 0.11 ends the process if such an array enters it.

    Attributes:
      arrays: the arrays with elements, in order.
      shapes: shapes and dtypes of all arrays on one device.
      structure: the structure of the pytree.
    """

    arrays: tuple[jax.Array, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...] = field(metadata={"static": True})
    structure: Any = field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any, parts: int) -> _Elements:
        """The _Elements of `tree`, whose arrays are split into `parts` along their first axis."""
        arrays, structure = jax.tree.flatten(tree)
        shapes = [(x.shape[0] // parts, *x.shape[1:]) if parts > 1 else x.shape for x in arrays]
        structs = (jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, arrays, strict=True))
        return cls(tuple(x for x in arrays if x.size), tuple(structs), structure)

    def whole(self) -> Any:
        """The whole pytree on one device, with arrays without elements made anew."""
        arrays = iter(self.arrays)
        found = [next(arrays) if struct.size else jnp.zeros(struct.shape, struct.dtype) for struct in self.shapes]
        return jax.tree.unflatten(self.structure, found)


@functools.cache
def _on_mesh(mesh: Mesh) -> Programs:
    rows, everywhere = NamedSharding(mesh, P(REPLICAS)), NamedSharding(mesh, P())
    # The shardings are given, so that a step returns its state and caches with the shardings that the next step takes.
    results = rows, NamedSharding(mesh, P(AXES)), everywhere

    def on_mesh(run: Callable[..., Any]) -> Callable[..., Any]:
        @partial(jax.jit, static_argnames="config", donate_argnames=_DONATED, out_shardings=results)
        def program(params: Any, caches: Any, state: State, constants: Constants, work: Any, config: StepConfig) -> Any:
            replicas, shards = (math.prod(mesh.shape[axis] for axis in axes) for axes in (REPLICAS, EXPERT_SHARDS))
            shared, of_replica = _Elements.of(constants, 1), _Elements.of(work, replicas)

            def of_device(params: Any, caches: Any, state: State, shared: _Elements, of_replica: _Elements) -> Any:
                state, caches, tokens = run(params, caches, state, shared.whole(), of_replica.whole(), config)
                return state, caches, lax.all_gather(tokens, REPLICAS, tiled=True)

            # check_vma would need a proof that the devices of one replica agree; they do, as they compute the same.
            mapped = jax.shard_map(
                of_device,
                mesh=mesh,
                in_specs=(param_specs(params, shards), P(AXES), P(REPLICAS), P(), P(REPLICAS)),
                out_specs=(P(REPLICAS), P(AXES), P()),
                check_vma=False,
            )
            return mapped(params, caches, state, shared, of_replica)

        return program

    drop = jax.jit(steps.drop_row, donate_argnames="state", out_shardings=rows)
    return Programs(
        on_mesh(steps.run_prefill),
        on_mesh(steps.run_decode),
        lambda state, row: drop(state, put(mesh, P(), np.int32(row))),
        mesh,
    )
