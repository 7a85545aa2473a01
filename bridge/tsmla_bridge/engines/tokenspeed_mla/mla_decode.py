"""tokenspeed_mla_decode: absorbed attention over a paged latent cache, with package tokenspeed_mla's parameters."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tsmla_bridge import blackwell, operators
from tsmla_bridge.engines import naming
from tsmla_bridge.engines.context_parallel import held_keys
from tsmla_bridge.ops import merge, mla_decode
from tsmla_bridge.ops.decode_plans import DecodeInputs, DecodeOptions, plan_for, plan_of_latest
from tsmla_bridge.runtime import scales, tensors
from tsmla_bridge.runtime.devices import in_own_precision
from tsmla_bridge.runtime.results import Computed, Results
from tsmla_kernels.contract.rules import show

LOG2_E = math.log2(math.e)
# The options after latent_dim, max_q_len and causal: this surface leaves them at their defaults.
_OTHER_OPTIONS = DecodeOptions(latent_dim=0, max_q_len=None)[3:]


def tokenspeed_mla_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    softmax_scale: float,
    output_scale: float = 1.0,
    out: torch.Tensor | None = None,
    is_var_seq: bool = True,
    causal_mask: bool = True,
    window_left: int = -1,
    enable_pdl: bool = False,
    return_lse: bool = False,
    causal_seqs: torch.Tensor | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave_size: int = 1,
    *,
    min_split_kv: int = 1,
    local_visible_lens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last S query tokens of each request over its latent cache.

    Args:
      query: [B, S, H, D] with D = kv_lora_rank + qk_rope_head_dim, latent columns first, in a dtype that mla_decode
        takes for q. A query that isn't contiguous is copied first; the cache is never copied.
      kv_cache: [P, Z, D] or [P, 1, Z, D], in query's dtype.
      workspace_buffer: int8, contiguous. A call that needs more takes its memory from torch's allocator instead, so no
        size is too small. A buffer belongs to one stream.
      kv_lora_rank, qk_rope_head_dim: 512 and 64 in DeepSeek.
      block_tables: [B, M] int32, pages of each request in order.
      seq_lens: [B] int32 or int64, keys of each request; 0 is legal.
      max_seq_len: bound on seq_lens.
      softmax_scale, output_scale: the factor of the logits (the model's scale times the scales of query and cache) and
        the factor of out (the cache's scale).
      out: where the result goes, [B, S, H, kv_lora_rank].
      is_var_seq, enable_pdl: ignored.
      min_split_kv: an int from 1 to 256, without effect: the schedule is made on the device.
      causal_mask: query i of S sees keys j < seq_len - (S - 1) + i, else all j < seq_len.
      window_left: query i sees no key before seq_len - S - window_left + i; at least S - 1, or -1 for no window.
      return_lse: also return lse, in base 2.
      causal_seqs, cp_world, cp_rank, cp_interleave_size: decode context parallelism. Keys are dealt to cp_world ranks
        cp_interleave_size at a time, seq_lens counts this rank's, and causal_seqs [B] counts all. The masks above hold
        with causal_seqs for seq_len, and a query sees only keys that this rank holds. With cp_world = 1 causal_seqs is
        not read.
      local_visible_lens: [B, S] int32, how many keys each query token sees, instead of the masks above. Legal with
        window_left = -1, cp_world = 1 and causal_seqs = None.

    Returns:
      out [B, S, H, kv_lora_rank] in query's dtype, bfloat16 when that is fp8; with return_lse also lse [B, S, H]
      float32, the logarithm to base 2. Rows that see no key give 0 and -inf.

    Masks that differ from token to token (a window, and context parallelism and local_visible_lens with S > 1) run as
    one request for each query token: right, but the keys of a request are read S times. Torch operations attend to the
    keys of a window that come before the first page that begins in it; the kernel attends to the keys from that page
    on, and the two results are merged.

    Raises:
      ValueError, TypeError: an argument is not legal.
      NotImplementedError: no kernel runs the call, with the reasons.
      RuntimeError: as mla_decode says.
    """
    if blackwell.runs("tokenspeed_mla_decode", query):
        real: Any = blackwell.package()
        return real.tokenspeed_mla_decode(
            query, kv_cache, workspace_buffer, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, max_seq_len,
            softmax_scale, output_scale, out, is_var_seq, causal_mask, window_left, enable_pdl, return_lse, causal_seqs,
            cp_world, cp_rank, cp_interleave_size, min_split_kv=min_split_kv, local_visible_lens=local_visible_lens,
        )  # fmt: skip
    ranks = (cp_world, cp_rank, cp_interleave_size)
    if kv_lora_rank < qk_rope_head_dim:
        raise ValueError(
            f"kv_lora_rank: got {kv_lora_rank}; legal: at least qk_rope_head_dim = {qk_rope_head_dim}, as no model has"
            " more rope columns than latent ones"
        )
    _check_sizes(query, kv_cache, workspace_buffer, kv_lora_rank + qk_rope_head_dim, max_seq_len, min_split_kv)
    _check_mask(query, window_left, causal_seqs, ranks, local_visible_lens)
    if out is not None:
        _check_out(out, query, kv_lora_rank)
    if seq_lens.dtype != torch.int32:
        if seq_lens.dtype != torch.int64:
            raise ValueError(f"seq_lens: got dtype {seq_lens.dtype}; legal: torch.int32, torch.int64")
        seq_lens = seq_lens.to(torch.int32)
    if window_left >= max_seq_len - 1 and cp_world == 1:
        window_left = -1  # nothing lies before such a window
    pair = (float(softmax_scale), float(output_scale))
    for name, number in zip(("softmax_scale", "output_scale"), pair, strict=True):
        scales.check(name, number, optional=False)
    dense_out = out if out is None or out.is_contiguous() else None
    if cp_world == 1 and local_visible_lens is None and window_left < 0:
        result, lse = _attend(
            query, block_tables, seq_lens, return_lse=return_lse, out=dense_out,
            kv_cache=kv_cache, pair=pair, workspace_buffer=workspace_buffer,
            options=(kv_lora_rank, None, causal_mask, *_OTHER_OPTIONS),
        )  # fmt: skip
    else:
        _check_batch(query, block_tables=block_tables, seq_lens=seq_lens, causal_seqs=causal_seqs)
        starts, stops = _visible(
            query.shape[1], seq_lens, causal_mask, window_left, causal_seqs, ranks, local_visible_lens
        )
        options = DecodeOptions(kv_lora_rank, None, causal=False)
        shared = _Shared(kv_cache, pair, workspace_buffer, options)
        result, lse = _attend_masked(query, block_tables, starts, stops, shared, return_lse, dense_out)
    if out is not None:
        result = out.copy_(result) if dense_out is None else out
    return result if lse is None else (result, lse.mul_(LOG2_E))


def _check_out(out: torch.Tensor, query: torch.Tensor, latent_dim: int) -> None:
    """ValueError unless the result fits `out`, which need not be contiguous."""
    shape = (*query.shape[:3], latent_dim)
    if tuple(out.shape) != shape:
        raise ValueError(f"out: got shape {tuple(out.shape)}; legal: {shape}")
    dtype = operators.out_dtype(query)
    if out.dtype != dtype:
        raise ValueError(f"out: got {tensors.dtype_name(out.dtype)}; legal: {tensors.dtype_name(dtype)}")
    if out.device != query.device:
        raise ValueError(f"out: got a tensor on {out.device}; it must be on query's device, {query.device}")


class _Shared(NamedTuple):
    """The arguments of `_attend` that all parts of a masked call have in common."""

    kv_cache: torch.Tensor
    pair: tuple[float, float]
    workspace_buffer: torch.Tensor
    options: DecodeOptions


def _attend(
    query: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    return_lse: bool,
    out: torch.Tensor | None,
    kv_cache: torch.Tensor,
    pair: tuple[float, float],
    workspace_buffer: torch.Tensor,
    options: tuple[Any, ...],
) -> Results:
    """mla_decode with the two scales that the kernel multiplies by. `options` are DecodeOptions, or a tuple equal to
    them, which takes less time to make."""
    if not query.is_contiguous():
        query = query.contiguous()
    compiling = torch.compiler.is_compiling()
    plan = None if compiling else plan_of_latest(query, kv_cache, block_tables, seq_lens, None, options)
    try:
        if plan is None:
            inputs, named = DecodeInputs(query, kv_cache, block_tables, seq_lens, None), DecodeOptions(*options)
            if compiling or operators.is_traced(query, kv_cache):
                result: Any = mla_decode.call_operator(inputs, pair, named, return_lse, out, None, None)
                return result if return_lse else (result, None)
            plan = plan_for(inputs, named)
        workspace = plan.address_in(workspace_buffer)
        return plan.run(
            query, kv_cache, block_tables, seq_lens, None,
            pair=pair, return_lse=return_lse, out=out, lse=None, workspace=workspace,
        )  # fmt: skip
    except naming.ERRORS as error:
        raise naming.renamed(error, naming.TOKENSPEED_DECODE) from None


def _attend_masked(
    query: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor | None,
    stops: torch.Tensor,
    shared: _Shared,
    return_lse: bool,
    out: torch.Tensor | None,
) -> Results:
    """Attention in which each query token sees its request's keys from starts (or 0) to stops, both [B, S]. To the
    kernel a token is a request of its own, with as many keys as its stop says."""
    batch, q_len, heads, head_dim = query.shape
    tokens, latent_dim = batch * q_len, shared.options.latent_dim
    query, stops = query.reshape(tokens, 1, heads, head_dim), stops.reshape(tokens)
    if q_len > 1:
        block_tables = block_tables.repeat_interleave(q_len, 0)
    out = None if out is None else out.view(tokens, 1, heads, latent_dim)
    if starts is None:
        result, lse = _attend(query, block_tables, stops, return_lse=return_lse, out=out, **shared._asdict())
    else:
        starts = torch.minimum(starts.reshape(tokens), stops)
        result, window_lse = _attend_window(query, block_tables, starts, stops, shared)
        result, lse = result if out is None else out.copy_(result), window_lse if return_lse else None
    shape = (batch, q_len, heads)
    return result.view(*shape, latent_dim), None if lse is None else lse.view(shape)


@in_own_precision
def _attend_window(
    query: torch.Tensor, block_tables: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor, shared: _Shared
) -> Computed:
    """Attention in which each query token, a request of its own, sees its keys from starts to stops, both [B].

    The kernel begins at the start of a page. So it attends to the keys from the first page on that begins in the
    window, through tables that begin with that page. Torch operations attend to the keys of the window before that
    page, and the two results are merged."""
    cache = tensors.without_head_axis(shared.kv_cache)
    num_pages, page_size, _ = cache.shape
    if not block_tables.shape[1] or not num_pages:  # no key, and no page to read the window's first part from
        none, none_lse = _attend(query, block_tables, stops.clamp(max=0), return_lse=True, out=None, **shared._asdict())
        assert none_lse is not None
        return none, none_lse
    entry = (starts + (page_size - 1)).div(page_size, rounding_mode="floor")  # first page not before starts
    column = torch.arange(block_tables.shape[1], device=starts.device)
    last = block_tables.shape[1] - 1
    behind = block_tables.gather(1, (entry[:, None] + column).clamp(max=last))
    begin_behind = entry * page_size
    lens = (stops - begin_behind).clamp(min=0)
    most, most_lse = _attend(query, behind, lens, return_lse=True, out=None, **shared._asdict())
    assert most_lse is not None

    first = starts.div(page_size, rounding_mode="floor")
    position = (first * page_size)[:, None] + torch.arange(page_size, dtype=torch.int32, device=starts.device)
    visible = (position >= starts[:, None]) & (position < torch.minimum(stops, begin_behind)[:, None])
    page = block_tables.gather(1, first.clamp(max=last).long()[:, None])[:, 0]
    page = page.clamp(0, num_pages - 1).long()  # where nothing is visible the table may hold anything
    dtype = tensors.accumulation_dtype(tensors.dtype_name(cache.dtype))
    logit_scale, out_scale = shared.pair
    keys = cache.view(torch.uint8)[page].view(cache.dtype).to(dtype)  # as bytes: not every dtype can be indexed
    keys = keys.masked_fill(~visible[..., None], 0)  # an unused slot may hold NaN
    scores = torch.einsum("bhd,bkd->bhk", query[:, 0].to(dtype), keys) * logit_scale
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    out = torch.einsum("bhk,bkl->bhl", weights, keys[..., : shared.options.latent_dim]) * out_scale
    merged, merged_lse = merge.merge_attention_states([most.to(dtype), out[:, None]], [most_lse, lse[:, None]])
    return merged.to(most.dtype), merged_lse


def _visible(
    q_len: int,
    seq_lens: torch.Tensor,
    causal: bool,
    window_left: int,
    causal_seqs: torch.Tensor | None,
    ranks: tuple[int, int, int],
    local_visible_lens: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The first key that each token sees (None: key 0) and the end of its keys, [B, S] int32 each, counted in this
    rank's keys. `ranks` are cp_world, cp_rank and the interleave."""
    keys = seq_lens[:, None]
    if local_visible_lens is not None:
        return None, torch.minimum(local_visible_lens, keys).clamp(min=0)
    world, *_ = ranks
    all_keys = keys if causal_seqs is None or world == 1 else causal_seqs.to(torch.int32)[:, None]
    token = torch.arange(q_len, dtype=torch.int32, device=seq_lens.device)
    last = all_keys - (q_len - 1) + token if causal else all_keys + 0 * token
    stops = torch.minimum(held_keys(last, *ranks), keys)
    if window_left < 0:
        return None, stops
    return held_keys(all_keys - q_len - window_left + token, *ranks), stops


def _check_sizes(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    head_dim: int,
    max_seq_len: int,
    min_split_kv: int,
) -> None:
    """ValueError for shapes, dtypes and bounds that the package tokenspeed_mla refuses and the contract does not."""
    if query.dim() != 4 or query.shape[-1] != head_dim:
        raise ValueError(
            f"query: got shape {show(tuple(query.shape))}; legal: [B, S, H, D], D = kv_lora_rank + qk_rope_head_dim ="
            f" {head_dim}"
        )
    if kv_cache.dtype != query.dtype:
        raise ValueError(f"kv_cache: got dtype {kv_cache.dtype}; it must be query's, {query.dtype}")
    if workspace_buffer.dtype != torch.int8:
        raise ValueError(f"workspace_buffer: got dtype {workspace_buffer.dtype}; legal: torch.int8")
    if max_seq_len <= 0:
        raise ValueError(f"max_seq_len: got {max_seq_len}; legal: an int >= 1")
    if type(min_split_kv) is not int or not 1 <= min_split_kv <= 256:
        raise ValueError(f"min_split_kv: got {min_split_kv}; legal: an int from 1 to 256")


def _check_batch(query: torch.Tensor, **given: torch.Tensor | None) -> None:
    """ValueError unless these tensors, by argument, have an entry for each of query's requests."""
    for name, tensor in given.items():
        if tensor is not None and tensor.shape[:1] != query.shape[:1]:
            got = show(tuple(tensor.shape))
            raise ValueError(f"{name}: got shape {got}; axis 0 must be {query.shape[0]} (B from query)")


def _check_mask(
    query: torch.Tensor,
    window_left: int,
    causal_seqs: torch.Tensor | None,
    ranks: tuple[int, int, int],
    local_visible_lens: torch.Tensor | None,
) -> None:
    """ValueError for masks that the package tokenspeed_mla refuses."""
    q_len = query.shape[1]
    if window_left < -1 or 0 <= window_left < q_len - 1:
        raise ValueError(f"window_left: got {window_left}; legal: -1, or at least S - 1 = {q_len - 1}")
    world, rank, interleave = ranks
    for name, value in (("cp_world", world), ("cp_interleave_size", interleave)):
        if value < 1:
            raise ValueError(f"{name}: got {value}; legal: an int >= 1")
    if not 0 <= rank < world:
        raise ValueError(f"cp_rank: got {rank}; legal: 0 to cp_world - 1 = {world - 1}")
    if world > 1 and causal_seqs is None:
        raise ValueError(f"causal_seqs: got None; with cp_world = {world} it must say how many keys all ranks hold")
    if local_visible_lens is not None:
        if window_left != -1 or world != 1 or causal_seqs is not None:
            raise ValueError(
                f"local_visible_lens: got a tensor with window_left = {window_left}, cp_world = {world} and causal_seqs"
                f" {'None' if causal_seqs is None else 'given'}; legal: None, or a tensor with -1, 1 and None"
            )
        shape, got = tuple(query.shape[:2]), local_visible_lens
        if tuple(got.shape) != shape or got.dtype != torch.int32 or got.device != query.device:
            raise ValueError(
                f"local_visible_lens: got {got.dtype}{show(tuple(got.shape))} on {got.device}; legal: [B, S] ="
                f" torch.int32{show(shape)} on query's device, {query.device}"
            )
