"""Adapter of the package tokenspeed_mla, whose kernels are written for Blackwell GPUs.

The package leaves the results of requests without keys and of query tokens that see none undefined, and gives lse in
base 2; this module makes both what the contract says. It has not been run on a Blackwell GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from types import ModuleType
from typing import Any

import torch

from tsmla_bridge.runtime import devices
from tsmla_bridge.runtime.results import Computed
from tsmla_bridge.runtime.scales import Pair
from tsmla_bridge.runtime.workspace import Workspace
from tsmla_kernels import contract
from tsmla_kernels.contract import DecodeSpec

PACKAGE = "tokenspeed_mla"
LN_2 = math.log(2.0)


def package() -> ModuleType | None:
    """The real package; None if it isn't installed, or its name belongs to tsmla_bridge's module."""
    imported = sys.modules.get(PACKAGE)
    if imported is not None:
        return None if imported.__name__.startswith("tsmla_bridge") else imported
    return importlib.import_module(PACKAGE) if importlib.util.find_spec(PACKAGE) else None


def is_device(device: torch.device) -> bool:
    """Whether this is a GPU that the package is written for."""
    return devices.kind(device) == "cuda" and devices.is_blackwell(devices.index_of(device))


def runs(op: str, tensor: torch.Tensor) -> bool:
    """Whether the package runs a call on this tensor: it does on a Blackwell GPU.

    NotImplementedError if the package can't be called."""
    if not is_device(tensor.device):
        return False
    if reasons := why_not():
        raise contract.not_runnable(op, "cute", reasons)
    return True


def why_not() -> list[str]:
    """Why the package can't be called; empty if it can."""
    if package() is not None:
        return []
    if PACKAGE in sys.modules:
        return [f"{PACKAGE} was replaced by tsmla_bridge's module, which has no kernel for Blackwell"]
    return ["on Blackwell the package tokenspeed-mla runs the call, and it isn't installed"]


def decode_reasons(spec: DecodeSpec) -> list[str]:
    """Why the package can't run this call; empty if it can."""
    reasons = why_not()
    if spec.q_dtype not in ("bfloat16", "float16", "float8_e4m3fn") or spec.kv_dtype != spec.q_dtype:
        reasons.append(
            f"q and kv_cache are {spec.q_dtype} and {spec.kv_dtype}; tokenspeed_mla takes bfloat16, float16 or"
            " float8_e4m3fn, and one dtype for both"
        )
    if (spec.latent_dim, spec.rope_dim) != (512, 64):
        reasons.append(
            f"latent_dim and the rope width are {spec.latent_dim} and {spec.rope_dim}; tokenspeed_mla takes 512 and 64"
        )
    if spec.page_size not in (32, 64):
        reasons.append(f"page size is {spec.page_size}; tokenspeed_mla takes 32 or 64 here")
    if spec.visible_lens:
        reasons.append("visible_lens is given; tokenspeed_mla takes the causal rule here")
    if spec.ragged:
        reasons.append("queries are ragged; tokenspeed_mla takes the same number of query tokens from every request")
    if spec.batch_invariant:
        reasons.append("batch_invariant is True; tokenspeed_mla promises no such thing")
    return reasons


def mla_decode(
    spec: DecodeSpec,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    pair: Pair,
    workspace: Workspace | None,
) -> Computed:
    """out and lse as mla_decode documents them."""
    if isinstance(pair, torch.Tensor):
        raise NotImplementedError(
            "mla_decode: got scales as tensors; on Blackwell tokenspeed_mla runs the call, and takes numbers alone"
        )
    # It reads the first page of a request without keys, and masks with a finite number where nothing is visible.
    has_keys = seq_lens > 0
    if workspace is None:
        rows = spec.num_heads * max(8, spec.max_q_len)
        size = devices.num_sms(q.get_device()) * rows * (spec.latent_dim + 1) * 4
        buffer = torch.empty(size, dtype=torch.int8, device=q.device)
    else:
        buffer = workspace.buffer.view(torch.int8)
    real: Any = package()
    out, lse = real.tokenspeed_mla_decode(
        query=q,
        kv_cache=kv_cache,
        workspace_buffer=buffer,
        kv_lora_rank=spec.latent_dim,
        qk_rope_head_dim=spec.rope_dim,
        block_tables=torch.where(has_keys[:, None], block_tables, 0),
        seq_lens=seq_lens.clamp(min=1),
        max_seq_len=spec.max_pages * spec.page_size,
        softmax_scale=pair[0],
        output_scale=pair[1],
        causal_mask=spec.causal,
        return_lse=True,
    )
    visible = seq_lens[:, None]
    if spec.causal:
        visible = visible - (spec.max_q_len - 1) + torch.arange(spec.max_q_len, device=q.device)
    nothing = (visible <= 0).expand(spec.batch, spec.max_q_len)[..., None]
    return out.masked_fill(nothing[..., None], 0), (lse * LN_2).masked_fill(nothing, -math.inf)
