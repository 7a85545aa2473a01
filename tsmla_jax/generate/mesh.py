"""The mesh of devices that a model runs on, and which arrays are split over which of its axes.

A copy of the model has expert x context devices, and there are `data` copies. Attention is shared out by texts: a
latent cache has one head, so devices that split heads would all hold the whole cache. The devices of one place on the
axes "data" and "expert" are a replica: they have texts and caches of their own, whose keys are dealt out over
"context" (in V4 the compressed entries; its windows are whole on each device). Experts are split over all devices of a
copy, and so is the output projection if its rows divide and it is not the embedding; each device holds everything else
whole.
This is the data parallel attention with expert parallelism of vLLM and SGLang, after DeepSeek-V3 (arXiv:2412.19437,
section 3.4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tsmla_jax.generate.config import ModelConfig, MoEConfig
from tsmla_jax.nn.products.block_scaled import BlockScaled, stack_size
from tsmla_jax.nn.products.mxfp4 import MXFP4

DATA, EXPERT, CONTEXT = AXES = ("data", "expert", "context")
REPLICAS = (DATA, EXPERT)
"""The axes that texts are shared out over."""
EXPERT_SHARDS = (EXPERT, CONTEXT)
"""The axes that experts are split over."""
EXPERT_PARTS = ("mlp", "shortcut")
"""Parts of a layer's parameters that may be a mixture of experts."""


@dataclass(frozen=True)
class MeshShape:
    """Devices along each axis.

    Attributes:
      data: copies of the model.
      expert: replicas of a copy, which attend for texts of their own.
      context: devices that the keys of one text, in V4 its compressed entries, are dealt out to.
    """

    data: int = 1
    expert: int = 1
    context: int = 1

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.data * self.expert * self.context

    @property
    def replicas(self) -> int:
        """The number of replicas, which have texts and caches of their own."""
        return self.data * self.expert

    @property
    def expert_shards(self) -> int:
        """The number of parts that the experts are split into."""
        return self.expert * self.context


ONE_DEVICE = MeshShape()


def check_mesh(config: ModelConfig, shape: MeshShape) -> None:
    """Raises ValueError, which says what fits, if the model can't be split in this shape, or if jax has too few devices
    or, in several processes, another number."""
    data, expert, context, shards = shape.data, shape.expert, shape.context, shape.expert_shards
    moe = config.moe if any(map(config.is_moe_layer, range(config.num_layers))) else None
    if expert > 1 and moe is None:
        raise ValueError(
            f"expert_parallel = {expert}: the model has no experts; legal: 1 (data_parallel deals out texts)"
        )
    if moe is not None and moe.num_experts % shards:
        legal = [count for count in range(1, moe.num_experts + 1) if moe.num_experts % count == 0]
        name = f"expert_parallel = {expert}" if expert > 1 else f"context_parallel = {context}"
        raise ValueError(
            f"{name}: {moe.num_experts} experts on expert_parallel x context_parallel = {shards} devices; legal "
            f"products: {', '.join(map(str, legal))}"
        )
    count, processes = jax.device_count(), jax.process_count()
    if shape.size > count or (processes > 1 and shape.size != count):
        kind = jax.devices()[0].platform
        most = count // shards
        fits = f"products of the three up to {count}"
        if processes > 1:
            fits = f"values of the three whose product is {count}"
        if most and (processes == 1 or most * shards == count):
            fits = f"data_parallel = {most}"
        if kind == "cpu" and processes == 1:
            fits += f"; JAX_NUM_CPU_DEVICES={shape.size} in the environment simulates that many"
        where = f"jax has {count} ({kind})" if processes == 1 else f"the {processes} processes have {count} ({kind})"
        raise ValueError(
            f"data_parallel = {data}, expert_parallel = {expert}, context_parallel = {context}: needs {shape.size} "
            f"devices, and {where}; what fits: {fits}"
        )


def make_mesh(shape: MeshShape) -> Mesh | None:
    """The mesh of jax's first devices; None for a single one, which needs none."""
    if shape.size == 1:
        return None
    sizes = (shape.data, shape.expert, shape.context)
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[: shape.size])


def put(mesh: Mesh | None, spec: P, tree: Any) -> Any:
    """Puts arrays that this process has whole, on the host or on a device, on the mesh. Without a mesh arrays of the
    host go to the default device.

    Arrays that are on the mesh already, and descriptions of such arrays, stay as they are."""

    def one(value: Any) -> jax.Array:
        if mesh is None:
            return jax.numpy.asarray(value)
        sharding = NamedSharding(mesh, spec)
        given = getattr(value, "sharding", None)
        if given is not None and given.device_set == sharding.device_set:
            return value
        whole = value if isinstance(value, jax.Array) else np.asarray(value)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(one, tree)


def put_shards(mesh: Mesh, read: Callable[[int], Any]) -> Any:
    """A tree of arrays that are split over EXPERT_SHARDS along their first axis.

    read: makes the tree of one shard on the host; called for the shards that this process's devices hold, one after the
      other, so that the host needs room for one at a time.
    """
    sharding = NamedSharding(mesh, P(EXPERT_SHARDS))
    count = mesh.shape[EXPERT] * mesh.shape[CONTEXT]
    owners: dict[int, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map((count,)).items():
        assert index is not None
        owners.setdefault(index[0].start or 0, []).append(device)
    parts: list[Any] = []
    for shard, devices in sorted(owners.items()):
        tree = read(shard)
        parts += [jax.device_put(tree, device) for device in devices]

    def join(*leaves: jax.Array) -> jax.Array:
        shape = (count * leaves[0].shape[0], *leaves[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, list(leaves))

    return jax.tree.map(join, *parts)


def head_spec(vocabulary: int, shards: int) -> P:
    """The spec of an output projection with `vocabulary` rows if experts are split into `shards` parts: split like the
    experts if `shards` divides its rows, else whole."""
    return P(EXPERT_SHARDS) if shards > 1 and vocabulary % shards == 0 else P()


def param_specs(params: Any, shards: int) -> Any:
    """The specs of a model's parameters on a mesh that splits experts into `shards` parts, as a prefix of their
    tree."""

    def of_layer(layer: Any) -> Any:
        return {name: of_part(part, name in EXPERT_PARTS) for name, part in layer.items()}

    def of_part(part: Any, may_be_experts: bool) -> Any:
        if not may_be_experts or "router" not in part:
            return P()
        return {name: P(EXPERT_SHARDS) if name in ("gate_up", "down") else P() for name in part}

    rest = {name: P() for name in params if name != "layers"}
    if "lm_head" in params:
        rest["lm_head"] = head_spec(params["lm_head"].shape[0], shards)
    return {**rest, "layers": [of_layer(layer) for layer in params["layers"]]}


def put_params(mesh: Mesh | None, params: Any, config: ModelConfig) -> Any:
    """The parameters of `load_model`, put on the mesh. Without a mesh they are only checked, and stay where they are.

    Arrays that are on the mesh already stay where they are, except an output projection and stacks of experts that are
    not split as this mesh needs them. Stacks without shared experts move only if every device has them whole.

    A device holds its own routed experts, its part of the output projection if that is split (`head_spec`), and all
    other weights whole. In its stacks the shared experts come after its routed ones; with experts in MXFP4 they have
    parameters of their own.

    Raises:
      ValueError: a stack of experts is neither whole nor split for this mesh.
    """
    layers = []
    for index, layer in enumerate(params["layers"]):
        for name in EXPERT_PARTS:
            mlp = layer.get(name, {})
            if config.moe is not None and "router" in mlp:
                stacks = {part: mlp[part] for part in ("gate_up", "down")}
                layer = {**layer, name: {**mlp, **_put_experts(mesh, f"layer {index}", stacks, config.moe)}}
        layers.append(layer)
    params = {**params, "layers": layers}
    if mesh is None:
        return params
    if "lm_head" in params:
        params["lm_head"] = put_head(mesh, params["lm_head"])
    return put(mesh, P(), params)


def put_head(mesh: Mesh, output: Any) -> Any:
    """An output projection, split over the mesh as `head_spec` says, also if it is there already in another
    sharding."""
    spec = head_spec(output.shape[0], mesh.shape[EXPERT] * mesh.shape[CONTEXT])
    there, sharding = put(mesh, spec, output), NamedSharding(mesh, spec)
    return there if there.sharding.is_equivalent_to(sharding, there.ndim) else jax.device_put(there, sharding)


def _put_experts(mesh: Mesh | None, layer: str, stacks: dict[str, Any], moe: MoEConfig) -> Any:
    """The stacks of one layer's experts on the mesh."""
    shards = 1 if mesh is None else mesh.shape[EXPERT] * mesh.shape[CONTEXT]
    held = jax.tree.leaves(stacks)[0].sharding
    there = mesh is not None and held.device_set == set(mesh.devices.flat)
    # Without shared experts whole stacks are as long as all shards.
    split = there and not (shards > 1 and held.is_fully_replicated)
    if split and all(_has_shards(weight, moe, shards) for weight in stacks.values()):
        return stacks
    for name, weight in stacks.items():
        if not _has_shards(weight, moe, 1):
            raise ValueError(
                f"params: {name} of {layer} has shape {weight.shape}, as if it were split for another mesh; legal: "
                f"{moe.num_experts} routed and {_num_shared(weight, moe)} shared experts, or those that load_model "
                f"puts on the same mesh"
            )
    return stacks if mesh is None else put_shards(mesh, partial(_shard_of, mesh, stacks, moe))


def _has_shards(weight: Any, moe: MoEConfig, shards: int) -> bool:
    """Whether a stack is as long as `shards` shards together, each with the shared experts after its own, unless these
    have parameters of their own."""
    each = len(experts_of(moe, shards, 0)) + _num_shared(weight, moe)
    if not isinstance(weight, BlockScaled):
        return bool(weight.shape[0] == shards * each)
    padded = stack_size(each, *weight.shape[1:])
    return weight.scales.shape[0] == shards * each and weight.values.shape[0] in (shards * each, shards * padded)


def _num_shared(weight: Any, moe: MoEConfig) -> int:
    """How many shared experts a stack has in each shard: those of experts in MXFP4 have parameters of their own."""
    return 0 if isinstance(weight, MXFP4) else moe.num_shared


def experts_of(moe: MoEConfig, shards: int, shard: int) -> range:
    """The routed experts of one of `shards` parts."""
    each = moe.num_experts // shards
    return range(shard * each, (shard + 1) * each)


def _shard_of(mesh: Mesh, stacks: Any, moe: MoEConfig, shard: int) -> Any:
    """One shard of stacks [E + S, ...] that this process has whole: its own experts and after them the shared ones,
    which stacks in MXFP4 don't have."""
    own = experts_of(moe, mesh.shape[EXPERT] * mesh.shape[CONTEXT], shard)

    def one(weight: Any) -> Any:
        ids = np.array([*own, *range(moe.num_experts, moe.num_experts + _num_shared(weight, moe))])
        if isinstance(weight, MXFP4):
            return MXFP4(weight.values[ids], weight.scales[ids])
        if not isinstance(weight, BlockScaled):
            return weight[ids]
        values = weight.values[ids]
        unused = stack_size(*values.shape) - len(ids)
        padded = jax.numpy.pad(values, ((0, unused), (0, 0), (0, 0))) if unused else values
        return dataclasses.replace(weight, values=padded, scales=weight.scales[ids])

    return jax.tree.map(one, stacks, is_leaf=lambda leaf: isinstance(leaf, BlockScaled | MXFP4))
