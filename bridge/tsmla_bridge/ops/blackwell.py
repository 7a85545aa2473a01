"""The kernels for Blackwell, launched on torch tensors.

tsmla_kernels.sm100 has the rules that make the operands (dense_arrays, sparse_arrays), which jax's front end shares:
lengths, pages and slots out of range read nothing outside of the arrays. No value is read on the host without
TSMLA_CHECK=1, so the calls can be captured into CUDA graphs. A call allocates its operands, its results and its
workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tsmla_bridge import reference, sparse_reference
from tsmla_bridge.ops.sparse_inputs import Pages, SparseInputs
from tsmla_bridge.runtime import devices, loaded_kernels, scales
from tsmla_bridge.runtime.library import library_of
from tsmla_bridge.runtime.results import Computed
from tsmla_bridge.runtime.scales import Pair
from tsmla_bridge.runtime.tensors import DTYPES, whole_pages
from tsmla_kernels.catalog import INDEXER_LOGITS_SM100, MLA_DECODE_SM100, MLA_PREFILL_SM100, SPARSE_MLA_SM100
from tsmla_kernels.contract import DecodeSpec, PrefillSpec, values
from tsmla_kernels.contract.layouts import CacheSpec
from tsmla_kernels.contract.sparse import IndexerLogitsSpec, SparseMLASpec
from tsmla_kernels.kernel import Config, Kernel
from tsmla_kernels.launch import ArrayView
from tsmla_kernels.sm100 import config as sm100
from tsmla_kernels.sm100 import dense_arrays, logits_config, sparse_arrays, sparse_config


def mla_decode(spec: DecodeSpec, given: dense_arrays.DecodeArrays, pair: Pair) -> Computed:
    """out and lse as mla_decode documents them, by TokenSpeed's kernels."""
    q, library = given.q, library_of(given.q.device)
    if values.enabled() and not devices.is_capturing():
        bad = dense_arrays.not_finite(library, spec, given.kv_cache, given.block_tables, given.seq_lens)
        sm100.check_finite(bad.tolist())
    config = sm100.decode_config(spec, traced_scales=isinstance(pair, torch.Tensor))
    index = devices.index_of(q.device)
    shapes = sm100.decode_outputs(spec, config, devices.arch(index), devices.num_sms(index))
    made = dense_arrays.decode_operands(library, spec, config, given)
    out, lse = q.new_empty(shapes[0], dtype=DTYPES[spec.out_dtype]), q.new_empty(shapes[1], dtype=torch.float32)
    workspace = q.new_empty(shapes[2], dtype=torch.int8)
    _run(MLA_DECODE_SM100, config, made._asdict(), {"out": out, "lse": lse, "workspace": workspace}, pair)
    found = dense_arrays.Attended(out, lse)
    return dense_arrays.decode_results(library, spec, found, made.visible_lens, given.cu_seqlens_q)


def mla_prefill(spec: PrefillSpec, given: dense_arrays.PrefillArrays, pair: Pair) -> Computed:
    """out and lse as mla_prefill documents them, by TokenSpeed's kernel."""
    q, v, library = given.q, given.v, library_of(given.q.device)
    config = sm100.prefill_config(spec, traced_scales=isinstance(pair, torch.Tensor))
    # As bytes: not all of torch's operations take float8.
    as_bytes = given._replace(v=v.view(torch.uint8)) if v.element_size() == 1 else given
    made = dense_arrays.prefill_operands(library, spec, config, as_bytes)
    operands = made.operands._replace(v=made.operands.v.view(v.dtype))
    out = q.new_empty((*q.shape[:2], spec.v_head_dim), dtype=DTYPES[spec.out_dtype])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    longest = ArrayView(out.data_ptr(), (spec.max_q_len,), "int8")  # only its size is read
    _run(MLA_PREFILL_SM100, config, operands._asdict(), {"out": out, "lse": lse, "longest_q": longest}, pair)
    return dense_arrays.prefill_results(library, spec, dense_arrays.Attended(out, lse), made)


def indexer_logits(spec: IndexerLogitsSpec, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """logits [T, M * Z] as indexer_logits documents them, by FlashInfer's kernel. `given`: the call's tensors."""
    tables, seen, keys = given["block_tables"], given["seq_lens"], spec.max_pages * spec.cache.page_size
    if spec.ragged:
        request, seen = reference.seen_keys(seen, given["cu_seqlens_q"], spec.num_tokens)
        tables = tables[request]
    seen = seen.clamp(0, keys)
    library = library_of(seen.device)
    config = logits_config.logits_config(spec, devices.num_sms(devices.index_of(seen.device)))
    made = sparse_arrays.logits_operands(library, spec, tables, seen, config.num_ctas)
    logits = given["weights"].new_empty((spec.num_tokens, logits_config.padded_columns(spec)))
    operands = {
        **{name: given[name] for name in ("q", "weights", "k_cache")},
        "block_tables": made.block_tables,
        "seq_lens": seen,
        "schedule": made.schedule,
    }
    _run(INDEXER_LOGITS_SM100, config, operands, {"logits": logits})
    visible: torch.Tensor = sparse_arrays.visible_logits(library, logits, seen, keys)
    return visible


def sparse_mla(spec: SparseMLASpec, inputs: SparseInputs, factors: tuple[float, float, float]) -> Computed:
    """out and lse as sparse_mla documents them, by cuDNN's kernel.

    factors: the factor of the logits, then a factor for the rows of each cache. The factors of two caches are equal.
    """
    q, library = inputs.q, library_of(inputs.q.device)
    caches, indices, of_rows = inputs.caches, inputs.indices, spec
    if not sparse_config.widens(spec):  # a layer's slice of a pool is read as the array that it is a part of
        pages = Pages.of("kv_cache", caches[0], spec.cache)
        indices, caches = pages.slots(indices), [whole_pages(caches[0], pages.step)]
        of_rows = replace(spec, cache=replace(spec.cache, num_pages=pages.shape[0]))

    def gather(cache: torch.Tensor, slots: torch.Tensor, layout: CacheSpec) -> torch.Tensor:
        return sparse_reference.rows_at(cache, slots.long(), layout).to(q.dtype)

    selected = sparse_arrays.selected_rows(library, of_rows, caches, indices, inputs.lengths, gather)
    made = sparse_arrays.sparse_operands(library, spec, q, selected)
    rows = made.q.shape[:2]
    out = q.new_empty((*rows, spec.latent_dim), dtype=DTYPES[spec.out_dtype])
    lse, greatest = (q.new_empty(rows, dtype=torch.float32) for _ in range(2))
    outputs = {"out": out, "max_logits": greatest, "lse": lse}
    config = sparse_config.sparse_config(spec)
    _run(SPARSE_MLA_SM100, config, made._asdict(), outputs, (factors[0] * factors[1], 1.0))
    sinks = None if inputs.sinks is None else inputs.sinks.float()
    found = dense_arrays.Attended(out, lse)
    return sparse_arrays.sparse_results(library, spec, found, selected.indices, sinks, factors[1])


def _run(
    kernel: Kernel,
    config: Config,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor | ArrayView],
    pair: Pair | None = None,
) -> None:
    """Launch a kernel on the current stream. A pair of scales in a tensor is an operand before the outputs. Two numbers
    are passed after the outputs, as the sizes of SCALE_OPERANDS; nothing reads the memory of these operands."""
    device = next(iter(inputs.values())).device
    index = devices.index_of(device)
    given: dict[str, Any] = {name: tensor.contiguous() for name, tensor in inputs.items()}
    with devices.made_current(index):
        stream = devices.current_stream(index)
        if isinstance(pair, torch.Tensor):
            given["scales"] = scales.on_device(pair, index, stream)
        given |= outputs
        views = {
            name: each if isinstance(each, ArrayView) else loaded_kernels.view(each) for name, each in given.items()
        }
        if isinstance(pair, tuple):
            sizes = zip(sm100.SCALE_OPERANDS, sm100.scale_sizes(*pair), strict=True)
            anywhere = views["out"].address  # only the sizes are read
            views |= {name: ArrayView(anywhere, (size,), "int8") for name, size in sizes}
        loaded_kernels.run(kernel, config, index, stream, views)
