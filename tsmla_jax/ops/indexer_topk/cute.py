"""indexer_topk by the CuTe DSL kernels of indexer_logits and select_topk: two custom calls for each chunk of rows.
Logits that no kernel computes (topk.logits_kernel says which) are computed as in xla.py, a chunk at a time.

If each token has its own row of the block table, tokens are partitioned, and vmap's axis is folded into them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tsmla_jax.ops import device, transforms
from tsmla_jax.ops.indexer_logits import blackwell as logits_blackwell
from tsmla_jax.ops.indexer_logits import cute as logits_cute
from tsmla_jax.ops.indexer_logits import xla as logits_xla
from tsmla_jax.ops.indexer_topk.reference import Results, nothing_selected, rows_of, unpacked
from tsmla_jax.ops.inputs import describe
from tsmla_jax.ops.kernel_call import kernel_call
from tsmla_jax.ops.selected.blocks import over_token_blocks
from tsmla_kernels.catalog import INDEXER_LOGITS, SELECT_TOPK
from tsmla_kernels.contract.sparse import IndexerTopkSpec, indexer_topk_spec
from tsmla_kernels.sm90.logits.config import LogitsConfig
from tsmla_kernels.topk import chunks
from tsmla_kernels.topk.logits_kernel import no_logits_kernel


def why_not(spec: IndexerTopkSpec) -> list[str]:
    """The reasons why the top-k kernel can't run this call; empty if it can."""
    return device.why_not(SELECT_TOPK) + chunks.selection_reasons(spec)


def notes(spec: IndexerTopkSpec) -> list[str]:
    """Notes for users: the launches of a call that the kernels can run."""
    tokens = spec.logits.num_tokens
    if chunks.selection_reasons(spec) or 0 in (tokens, spec.num_columns):
        return []
    plan = chunks.chunks_of(spec)
    count, size = len(plan.starts(tokens)), chunks.workspace_bytes(plan.rows, spec.num_columns) / 2**20
    times = f"; {count} times, by chunks of rows" if count > 1 else ""
    found = [f"the logits of {plan.rows} query rows, {size:.1f} MiB, then their top-k{times}"]
    arch = device.target_arch() or chunks.HOPPER
    if reasons := no_logits_kernel(spec, arch):
        found.append(f"the logits as xla computes them: {'; '.join(reasons)}")
    return [*found, *logits_cute.notes(spec.logits)]


def indexer_topk(
    q: jax.Array,
    weights: jax.Array,
    k_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array | None = None,
    *,
    spec: IndexerTopkSpec,
) -> Results:
    """The results as the public indexer_topk documents them."""
    if 0 in (spec.logits.num_tokens, spec.logits.num_requests, spec.num_columns):
        return unpacked(nothing_selected(spec))
    arch = device.arch_for(SELECT_TOPK)
    offsets = () if cu_seqlens_q is None else (cu_seqlens_q,)
    options = Options(spec.k, spec.return_slots, spec.return_scores, spec.return_bits)
    run = _transformable(options, spec.logits.ragged, arch, device.num_sms(arch))
    results: Results = run(q, weights, block_tables, seq_lens, *offsets, k_cache)
    return results


class Options(NamedTuple):
    """The static arguments of a call."""

    k: int
    return_slots: bool
    return_scores: bool
    return_bits: bool


@functools.cache
def _transformable(options: Options, ragged: bool, arch: str, num_sms: int) -> Callable[..., Any]:
    """The call as a function of (q, weights, block_tables, seq_lens, cu_seqlens_q if ragged, k_cache)."""
    return_slots, return_scores = options.return_slots, options.return_scores

    def on_device(*arrays: jax.Array) -> Results:
        names = ("q", "weights", "block_tables", "seq_lens", *("cu_seqlens_q",) * ragged, "k_cache")
        given = dict(zip(names, arrays, strict=True))
        described: dict[str, Any] = {name: describe(name, array) for name, array in given.items()}
        # The rows of this device decide.
        spec = indexer_topk_spec(**described, **options._asdict())
        return _by_chunks(given, spec, arch, num_sms)

    def fold(run: Callable[..., Any], axis_size: int, *arrays: jax.Array) -> Any:
        if ragged:
            return None
        *rows, k_cache = arrays
        results = run(*map(transforms.fold_rows, rows), k_cache)
        return jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)

    rule = "t h d, t h, b m, b, c, p z e" if ragged else "t h d, t h, t m, t, p z e"
    return transforms.transformable(
        on_device,
        rule=f"{rule} -> t k" + (", t" if return_slots else "") + (", t k" if return_scores else ""),
        fixed=tuple("thdbmcpzek" if ragged else "hdmpzek"),
        partition=functools.partial(_partition, ragged, return_slots, return_scores),
        fold=fold,
        shared=1,
    )


def _by_chunks(given: dict[str, jax.Array], spec: IndexerTopkSpec, arch: str, num_sms: int) -> Results:
    """The results of all query rows of a device, chunk by chunk. given: the operands by name."""
    plan = chunks.chunks_of(spec, num_sms, arch=arch, logits_kernel=not no_logits_kernel(spec, arch))
    tokens = spec.logits.num_tokens
    block_tables, seq_lens = given["block_tables"], given["seq_lens"]
    cu_seqlens_q = given.get("cu_seqlens_q")
    several = plan.rows < tokens
    num_requests = spec.logits.num_requests if spec.logits.ragged else plan.rows
    of_rows = dataclasses.replace(spec.logits, num_tokens=plan.rows, num_requests=num_requests)
    # The other arrays that are cut into chunks. With one row of the block table a token: the block table and how many
    # keys each row sees. In ragged calls: each row's index; and each row's key count and request, unless the kernel of
    # the logits writes these two.
    where: tuple[jax.Array, ...] = block_tables, seq_lens
    if cu_seqlens_q is not None:
        where = (jnp.arange(tokens, dtype=jnp.int32),) if several else ()
        where += () if isinstance(plan.logits, LogitsConfig) else rows_of(spec, seq_lens, cu_seqlens_q)[::-1]
    whole = jax.eval_shape(lambda: nothing_selected(spec))

    def chunk(q: jax.Array, weights: jax.Array, *where: jax.Array) -> Any:
        tables = block_tables
        seen_and_request: Sequence[jax.Array] = where
        requests: Sequence[Any] = seq_lens, cu_seqlens_q
        if cu_seqlens_q is None:
            tables, *seen_and_request = where
            requests = seen_and_request
        elif several:
            row, *seen_and_request = where
            requests = of_chunk(seq_lens, cu_seqlens_q, row[0], plan.rows)
        operands = (q, weights, given["k_cache"], tables, *requests)
        if plan.logits is None:
            logits = logits_xla.indexer_logits(*operands, spec=of_rows)
        elif not isinstance(plan.logits, LogitsConfig):
            logits = logits_blackwell.on_one_device(*operands, spec=of_rows, arch=arch, num_sms=num_sms)
        else:
            by_products = ((plan.rows,), (plan.rows,)) if plan.logits.writes_rows else ()
            shapes = ((plan.rows, spec.num_columns), *by_products)
            logits, *written = kernel_call(INDEXER_LOGITS, plan.logits, operands, shapes, arch=arch)
            seen_and_request = (*seen_and_request, *written)
        seen, *request = seen_and_request
        slots = (tables, *request) if spec.return_slots else ()
        selected = tuple((plan.rows, *x.shape[1:]) for x in whole)
        return tuple(kernel_call(SELECT_TOPK, plan.topk, (logits, seen, *slots), selected, arch=arch))

    results = over_token_blocks(
        chunk,
        (given["q"], given["weights"], *where),
        whole,
        block=plan.rows,
        varying_with=tuple(given.values()),
    )
    return unpacked(results)


def of_chunk(seq_lens: jax.Array, cu_seqlens_q: jax.Array, first: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """(seq_lens, cu_seqlens_q) of a chunk, the `rows` query rows from `first` on, as if there were no other rows. A
    request's tokens after the chunk have the request's last keys, which no token in the chunk sees: seq_lens leaves
    them out.
    """
    behind = jnp.maximum(cu_seqlens_q[1:] - (first + rows), 0)
    return jnp.maximum(seq_lens - behind, 0), jnp.clip(cu_seqlens_q - first, 0, rows)


def _partition(ragged: bool, return_slots: bool, return_scores: bool, shapes: Sequence[Any]) -> transforms.Partition:
    """The sharding of q along tokens, everything else whole; if calls are ragged, nothing is split."""
    rows = None if ragged else transforms.named_axes(shapes[0])[0]
    cu_seqlens_q = (P(None),) if ragged else ()
    operands = (P(rows, None, None), P(rows, None), P(rows, None), P(rows), *cu_seqlens_q, P(None, None, None))
    results = P(rows, None), *((P(rows),) if return_slots else ()), *((P(rows, None),) if return_scores else ())
    return operands, results if len(results) > 1 else results[0]
