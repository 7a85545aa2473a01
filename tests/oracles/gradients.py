"""mla_prefill in float64 and its gradient: torch's autograd through the softmax as it is written down."""

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

    def results(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse in float64; 0 and -inf in rows that see no key, and in those of no request."""
        q, k, v = q.double(), k.double(), v.double()
        out = q.new_zeros((*q.shape[:2], v.shape[2]))
        lse = q.new_full(q.shape[:2], -torch.inf)
        first_q = first_k = 0
        for n, m in zip(self.q_lens, self.kv_lens, strict=True):
            unseen = max(n - m, 0) if self.causal else (0 if m else n)  # rows in front that see no key
            mine, theirs = slice(first_q + unseen, first_q + n), slice(first_k, first_k + m)
            first_q, first_k = first_q + n, first_k + m
            if unseen == n:
                continue
            scores = torch.einsum("shd,khd->hsk", q[mine], k[theirs]) * self.scale
            if self.causal:
                visible = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)[unseen:]
                scores = scores.masked_fill(~visible, -torch.inf)
            out[mine] = torch.einsum("hsk,khv->shv", scores.softmax(-1), v[theirs]) * self.v_scale
            lse[mine] = scores.logsumexp(-1).T
        return out, lse

    def want(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor
    ) -> Tensors:
        """dq, dk and dv in float64; 0 in rows of no request."""
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        out, lse = self.results(*leaves)
        seen = lse != -torch.inf
        if not seen.any():
            return tuple(torch.zeros_like(x) for x in leaves)
        return torch.autograd.grad((out[seen], lse[seen]), leaves, (dout[seen].double(), dlse[seen].double()))

    def kv_numbers(self, dtype: torch.dtype, device: str = "cpu", rope_dim: int = 64) -> Tensors:
        """q, kv, k_rope, dout and dlse of the call as mla_prefill_kv takes it: all heads share k's last columns."""
        q, k, v, dout, dlse = self.numbers(dtype, device)
        nope = self.dims[0] - rope_dim
        return q, torch.cat((k[..., :nope], v), -1), k[:, 0, nope:].contiguous(), dout, dlse

    def expanded(self, q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor) -> Tensors:
        """q, k and v of a call of mla_prefill_kv."""
        nope = q.shape[2] - k_rope.shape[1]
        rope = k_rope[:, None].expand(-1, kv.shape[1], -1)
        return q, torch.cat((kv[..., :nope], rope), -1), kv[..., nope:]

    def want_kv(
        self, q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor
    ) -> Tensors:
        """dq, dkv and dk_rope in float64."""
        dq, dk, dv = self.want(*self.expanded(q, kv, k_rope), dout, dlse)
        nope = q.shape[2] - k_rope.shape[1]
        return dq, torch.cat((dk[..., :nope], dv), -1), dk[..., nope:].sum(1)
