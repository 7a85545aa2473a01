"""The kernels for Blackwell, launched on torch tensors: their operands for a call, made safe for any input.

tsmla_kernels.sm100.arrays has the rules, which jax's front end shares. Nothing reads a value on the host, so the calls
can be captured into CUDA graphs. They allocate what the rules make.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch

from tsmla_bridge import reference, sparse_reference
from tsmla_bridge.ops.sparse_inputs import Pages, SparseInputs
from tsmla_bridge.runtime import devices, loaded_kernels
from tsmla_bridge.runtime.results import Computed
from tsmla_bridge.runtime.tensors import DTYPES
from tsmla_kernels.catalog import INDEXER_LOGITS_SM100, SPARSE_MLA_SM100
from tsmla_kernels.contract.layouts import CacheSpec
from tsmla_kernels.contract.sparse import IndexerLogitsSpec, SparseMLASpec
from tsmla_kernels.launch import ArrayView
from tsmla_kernels.sm100 import arrays, logits_config, sparse_config
from tsmla_kernels.sm100 import config as sm100


def library(device: torch.device) -> arrays.Library:
    """torch on this device, for the rules on operands."""
    return arrays.Library(torch, functools.partial(torch.arange, dtype=torch.int32, device=device))


def indexer_logits(spec: IndexerLogitsSpec, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """logits [T, M * Z] as indexer_logits documents them, by FlashInfer's kernel. `given`: the call's tensors."""
    tables, seen, keys = given["block_tables"], given["seq_lens"], spec.max_pages * spec.cache.page_size
    if spec.ragged:
        request, seen = reference.seen_keys(seen, given["cu_seqlens_q"], spec.num_tokens)
        tables = tables[request]
    seen = seen.clamp(0, keys)
    torch_here = library(seen.device)
    config = logits_config.logits_config(spec, devices.num_sms(devices.index_of(seen.device)))
    made = arrays.logits_operands(torch_here, spec, tables, seen, config.num_ctas)
    logits = given["weights"].new_empty((spec.num_tokens, logits_config.padded_columns(spec)))
    operands = {
        **{name: given[name] for name in ("q", "weights", "k_cache")},
        "block_tables": made.block_tables,
        "seq_lens": seen,
        "schedule": made.schedule,
        "logits": logits,
    }
    views = {name: loaded_kernels.view(tensor) for name, tensor in operands.items()}
    loaded_kernels.run_on(INDEXER_LOGITS_SM100, config, seen.device, views)
    visible: torch.Tensor = arrays.visible_logits(torch_here, logits, seen, keys)
    return visible


def sparse_mla(spec: SparseMLASpec, inputs: SparseInputs, factors: tuple[float, float, float]) -> Computed:
    """out and lse as sparse_mla documents them, by cuDNN's kernel.

    factors: of the logits, and of the rows of both caches, which are equal if there are two.
    """
    q, device = inputs.q, inputs.q.device
    caches, indices, layouts = inputs.caches, inputs.indices, spec.caches
    if not sparse_config.widens(spec):  # a layer's slice of a pool is read as the array that it is a part of
        pages = Pages.of("kv_cache", caches[0], spec.cache)
        indices, layouts = pages.slots(indices), (replace(spec.cache, num_pages=pages.shape[0]),)
        caches = [pages.whole(caches[0])]
    of_rows = replace(spec, cache=layouts[0])

    def gather(cache: torch.Tensor, slots: torch.Tensor, layout: CacheSpec) -> torch.Tensor:
        return sparse_reference.rows_at(cache, slots.long(), layout).to(q.dtype)

    torch_here = library(device)
    selected = arrays.selected_rows(torch_here, of_rows, caches, indices, inputs.lengths, gather)
    made = arrays.sparse_operands(torch_here, spec, q, selected)
    rows = made.q.shape[:2]
    out = q.new_empty((*rows, spec.latent_dim), dtype=DTYPES[spec.out_dtype])
    lse, greatest = (q.new_empty(rows, dtype=torch.float32) for _ in range(2))
    operands = {**made._asdict(), "out": out, "max_logits": greatest, "lse": lse}
    views = {name: loaded_kernels.view(tensor) for name, tensor in operands.items()}
    sizes = sm100.scale_sizes(factors[0] * factors[1], 1.0)
    for name, size in zip(sm100.SCALE_OPERANDS, sizes, strict=True):
        views[name] = ArrayView(out.data_ptr(), (size,), "int8")  # only its size is read
    loaded_kernels.run_on(SPARSE_MLA_SM100, sparse_config.sparse_config(spec), device, views)
    sinks = None if inputs.sinks is None else inputs.sinks.float()
    found = arrays.sparse_results(torch_here, spec, arrays.Attended(out, lse), selected.indices, sinks, factors[1])
    return found.out, found.lse
