"""What every kernel with a custom call in jax computes, on a CPU: its own operands through the reference."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import tsmla_jax
from tests.emulator import decode, prefill
from tests.emulator import sparse as sparse_attention
from tsmla_jax import sparse
from tsmla_jax.ops.explain import OPERATIONS
from tsmla_jax.ops.gather_kv_cache import reference as gather
from tsmla_jax.ops.merge_attention_states import reference as merge
from tsmla_jax.ops.mla_prefill import backward
from tsmla_jax.ops.ragged import seen_keys
from tsmla_jax.ops.rope_write_kv_cache import reference as rope_write
from tsmla_jax.ops.write_kv_cache import reference as write
from tsmla_kernels.kernel import Kernel

Results = list[Any]


def write_kv_cache(*arrays: jax.Array, config: Any, **_: object) -> Results:
    *given, scale = arrays
    if not config.rope_dim:
        given[2] = given[1][:, :0]
    spec = OPERATIONS["write_kv_cache"].spec_of(*given)
    return [write.write_kv_cache(*given, spec=spec, kv_scale=scale[0])]


def gather_kv_cache(*arrays: jax.Array, config: Any, result_shapes: Any, **_: object) -> Results:
    *given, scale = arrays
    options = {"total_len": result_shapes[0][0], "out_dtype": config.out_dtype}
    spec = OPERATIONS["gather_kv_cache"].spec_of(*given, **options)
    return [gather.gather_kv_cache(*given, spec=spec, kv_scale=scale[0])]


def rope_write_kv_cache(*arrays: jax.Array, config: Any, result_shapes: Any, **_: object) -> Results:
    kv, q_nope, q_rope, latent, *given, q_scale, kv_scale = arrays
    tokens = latent.shape[0]
    heads = (array.reshape(tokens, -1, array.shape[-1]) for array in (q_nope, q_rope))
    given = [kv, *heads, latent, *given]
    layouts = {"rope_interleave": config.rope_interleave, "rope_layout": config.rope_layout}
    spec = OPERATIONS["rope_write_kv_cache"].spec_of(*given, q_dtype=config.q_dtype, **layouts)
    q, written = rope_write.rope_write_kv_cache(*given, spec=spec, q_scale=q_scale[0], kv_scale=kv_scale[0])
    return [q.reshape(result_shapes[0]), written]


def merge_attention_states(*arrays: jax.Array, config: Any, **_: object) -> Results:
    assert all(x.ndim == 2 for x in arrays[: config.parts])
    outs, lses = list(arrays[: config.parts]), list(arrays[config.parts :])
    spec = OPERATIONS["merge_attention_states"].spec_of(outs, lses)
    return list(merge.merge_attention_states(outs, lses, spec=spec))


ROPE = ("rope_interleave", "rope_offset", "rope_layout")


def packed_row(*arrays: jax.Array, kernel: Kernel, config: Any, result_shapes: Any, **_: object) -> Results:
    """The kernels of packed caches, with the rotation that their config names."""
    call = list(arrays)
    if kernel.name == "indexer_quantize":
        call[:2] = arrays[0].reshape(-1, config.num_heads, 128), arrays[1].reshape(-1, config.num_heads)
    options = {name: getattr(config, name) for name in ROPE if hasattr(config, name)}
    results = getattr(sparse, kernel.name)(*call, **options, implementation="reference")
    return [x.reshape(shape) for x, shape in zip(jax.tree.leaves(results), result_shapes, strict=True)]


def indexer_logits(q: jax.Array, weights: jax.Array, k_cache: jax.Array, *tables: jax.Array, config: Any,
                   **_: object) -> Results:  # fmt: skip
    lens = tables[1]
    offsets = {"cu_seqlens_q": tables[2]} if len(tables) == 3 else {}
    logits = tsmla_jax.indexer_logits(q, weights, k_cache, *tables[:2], **offsets, implementation="reference")
    if not config.writes_rows:
        return [logits]
    by_products = seen_keys(lens, tables[2], q.shape[0])[::-1]
    return [jnp.where(jnp.isneginf(logits), jnp.nan, logits), *by_products]  # the top-k does not look at these


def select_topk(logits: jax.Array, lens: jax.Array, *tables: jax.Array, config: Any, **_: object) -> Results:
    if config.row_requests:
        table, request = tables
        tables = (table[request],)
    slots: dict[str, Any] = {"block_tables": tables[0], "page_size": config.page_size} if tables else {}
    options: dict[str, Any] = {"order": config.order, "implementation": "reference"}
    if config.bits:
        options["return_bits"] = True
    scores: Results = []
    if config.scores:
        positions = tsmla_jax.select_topk(logits, lens, config.k, **options)
        found = jnp.take_along_axis(logits, jnp.maximum(positions, 0), axis=1)
        scores = [jnp.where(positions >= 0, found, -jnp.inf)]
    return [*jax.tree.leaves(tsmla_jax.select_topk(logits, lens, config.k, **options, **slots)), *scores]


def product(x: jax.Array, weight: jax.Array, *others: jax.Array, kernel: Kernel, config: Any, **_: object) -> Results:
    function, form = getattr(tsmla_jax, kernel.name), {"gated": config.gated, "limit": config.limit}
    given = [None] * (config.wide + config.plain) + list(others)
    if config.picked:
        form["rows"] = given.pop()
    return jax.tree.leaves(function(x, weight, *given, out_dtype=config.out_dtype, implementation="reference", **form))


def quantize_blocks(x: jax.Array, config: Any, **_: object) -> Results:
    return list(tsmla_jax.quantize_blocks(x, power_of_two=config.power_of_two, implementation="reference"))


def selection_bits(positions: jax.Array, *others: jax.Array, config: Any, result_shapes: Any, **_: object) -> Results:
    names = [name for name in ("lengths", "starts") if getattr(config, name)]
    given = dict(zip(names, others, strict=True))
    return [tsmla_jax.selection_bits(positions, 32 * result_shapes[0][1], **given, implementation="reference")]


def compress_write_kv_cache(*arrays: jax.Array, config: Any, result_shapes: Any, **_: object) -> Results:
    cache, rows, kept, kv_score, ape, slots, lens, offsets, weight, cos_sin, tables, scale = arrays
    width = config.series * config.channels
    state = sparse.CompressorState(rows.reshape(*rows.shape[:2], 2, width), kept)
    written, state = tsmla_jax.compress_write_kv_cache(
        cache, kv_score.reshape(-1, 2, width), ape, state, weight, cos_sin, tables, state_slots=slots, seq_lens=lens,
        cu_seqlens_q=offsets, ratio=config.ratio, overlap=config.series == 2, eps=config.eps,
        page_size=config.page_size or None, implementation="reference",
    )  # fmt: skip
    del scale  # 1
    return [x.reshape(shape) for x, shape in zip((written, *state), result_shapes, strict=True)]


EMULATIONS: Mapping[str, Callable[..., Results]] = {
    "mla_decode": decode.emulate, "mla_prefill": prefill.emulate, "mla_prefill_kv": prefill.emulate,
    "mla_prefill_backward": prefill.emulate, "sparse_mla": sparse_attention.emulate,
    "write_kv_cache": write_kv_cache, "rope_write_kv_cache": rope_write_kv_cache, "gather_kv_cache": gather_kv_cache,
    "merge_attention_states": merge_attention_states, "write_packed_kv_cache": packed_row,
    "write_indexer_cache": packed_row, "indexer_quantize": packed_row, "indexer_logits": indexer_logits,
    "select_topk": select_topk, "block_scaled_matmul": product, "grouped_block_scaled_matmul": product,
    "quantize_blocks": quantize_blocks, "selection_bits": selection_bits,
    "compress_write_kv_cache": compress_write_kv_cache,
}  # fmt: skip


def emulate(*arrays: jax.Array, kernel: Kernel, **params: Any) -> Results:
    return EMULATIONS[kernel.name](*arrays, kernel=kernel, **params)


def traced() -> list[Callable[..., Any]]:
    """The functions of all kernels' calls that keep what was traced."""
    names = [name for name, operation in OPERATIONS.items() if "cute" in operation.table]
    modules = [backward, *(importlib.import_module(f"tsmla_jax.ops.{name}.cute") for name in names)]
    found = {id(x): x for module in modules for x in vars(module).values() if hasattr(x, "cache_clear")}
    return [x for x in found.values() if x.__name__ in ("_transformable", "_differentiable")]


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Every kernel's custom call runs on CPUs in this process."""
    with decode.emulated(*traced(), by=emulate):
        yield
