"""The gradient of mla_prefill in float64: torch's autograd through the softmax as it is written down."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Packed:
    """A call of mla_prefill and the cotangents of its results: q_lens and kv_lens tokens of each request, and `padding`
    rows of NaN behind them."""

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    heads: int = 2
    dims: tuple[int, int] = (24, 16)
    padding: int = 2
    causal: bool = True
    scale: float = 0.3
    v_scale: float = 1.0

    def numbers(self, dtype: torch.dtype, device: str = "cpu") -> Tensors:
        """q, k, v, dout and dlse."""
        generator = torch.Generator().manual_seed(sum(self.q_lens) + sum(self.kv_lens))
        made = []
        for lens, width in zip((self.q_lens, self.kv_lens, self.kv_lens, self.q_lens), (0, 0, 1, 1), strict=True):
            shape = (sum(lens) + self.padding, self.heads, self.dims[width])
            rows = torch.randn(shape, generator=generator, dtype=torch.float64)
            rows[sum(lens) :] = torch.nan
            made.append(rows.to(device, dtype))
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        dlse = torch.randn(made[0].shape[:2], generator=generator, dtype=torch.float64)
        return *made, dlse.to(device, lse_dtype)

    def options(self, device: str = "cpu") -> dict[str, Any]:
        """The other arguments."""
        q_starts, kv_starts = (
            torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)
            for lens in (self.q_lens, self.kv_lens)
        )
        return {
            "cu_seqlens_q": q_starts,
            "cu_seqlens_kv": kv_starts,
            "max_q_len": max(self.q_lens),
            "max_kv_len": max(self.kv_lens),
            "softmax_scale": self.scale,
            "v_scale": self.v_scale,
            "causal": self.causal,
        }

    def want(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor
    ) -> Tensors:
        """dq, dk and dv in float64; 0 in rows of no request."""
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        total = torch.zeros((), dtype=torch.float64, device=q.device)
        first_q = first_k = 0
        for n, m in zip(self.q_lens, self.kv_lens, strict=True):
            mine, theirs = slice(first_q, first_q + n), slice(first_k, first_k + m)
            first_q, first_k = first_q + n, first_k + m
            unseen = max(n - m, 0) if self.causal else (0 if m else n)  # rows in front that see no key
            if unseen == n:
                continue
            scores = torch.einsum("shd,khd->hsk", leaves[0][mine], leaves[1][theirs])[:, unseen:] * self.scale
            if self.causal:
                visible = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)[unseen:]
                scores = scores.masked_fill(~visible, -torch.inf)
            out = torch.einsum("hsk,khv->shv", scores.softmax(-1), leaves[2][theirs]) * self.v_scale
            total = total + (out * dout[mine][unseen:]).sum()
            total = total + (scores.logsumexp(-1).T * dlse[mine][unseen:]).sum()
        if not total.requires_grad:
            return tuple(torch.zeros_like(x) for x in leaves)
        return torch.autograd.grad(total, leaves)
