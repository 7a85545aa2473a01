"""The gradient of mla_prefill: only the operator of the backward pass, causal, on random normal bf16; points are named
as in prefill, without older tokens. "tsmla_deterministic" is the operator with gradients that repeat bit by bit.
"tsmla_kv" is the operator of mla_prefill_kv, with gradients of kv and of the rope columns that all heads share.
"tsmla_selected" is the operator of mla_prefill with a selection, at points of one request: a token selects 2048 random
keys up to its own (half of the request's tokens if that is fewer), or all of them if they are fewer. cuDNN's is the
operator that torch's autograd calls. A function holds all operands of its operator, because the replays of a CUDA graph
read them where they were. Older records have calls through autograd, timed by CUDA events.

Errors are relative (Frobenius) and against float64; they are measured on one request of 2048 tokens and 16 heads, and
every row of a function with the same head dims repeats them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

import tsmla_bridge
from benchmarks.cases.prefill import WIDE, head_dims, lengths_of
from benchmarks.cases.sparse_mla_prefill import draw_prompt
from benchmarks.harness import Case, Object, Run, device, ints, randn
from benchmarks.peers import dense

ROPE = 64
CHECKED = "2048h16"
SELECTION = "tsmla_selected"
MODES = {"tsmla_deterministic": "deterministic", "tsmla_kv": "kv and k_rope", SELECTION: "selected keys"}
SELECTED = 2048


def read_point(name: str) -> tuple[tuple[int, ...], int]:
    """Tokens of each request, and heads.

    Raises:
      ValueError: there is no such point, or it has tokens before the new ones.
    """
    lens, kv_lens, heads = lengths_of(name)
    if lens != kv_lens:
        raise ValueError(f"--points: got {name!r}; legal: like 4096h128, 4096h16-256, ragged16h16")
    return lens, heads


class PrefillBackward(Case):
    read = staticmethod(read_point)
    points = (
        *(f"{length}h{h}" for h in (16, 64, 128) for length in (4096, 8192, 16384)), "ragged16h16",
        *(f"{length}h{h}{WIDE}" for h in (16, 64) for length in (4096, 8192, 16384)),
    )  # fmt: skip
    common: ClassVar = {"dtype": "bf16", "causal": True}
    peers: ClassVar = {"cudnn": "cudnn", "fa4": "fa4"}

    def __init__(self, point: str) -> None:
        super().__init__(point)
        self.lens, self.heads = read_point(point)
        k_dim, v_dim = self.dims = head_dims(point)
        widths, self.scale, self.nope = (k_dim, k_dim, v_dim, v_dim), k_dim**-0.5, k_dim - ROPE
        self.q, self.k, self.v, self.d_out = (randn(sum(self.lens), self.heads, n) for n in widths)
        self.k[..., self.nope :] = self.k[:, :1, self.nope :]  # all heads share the rope columns
        self.cu = ints([0, *itertools.accumulate(self.lens)])
        self.iterations = 20 if max(self.lens) < 16384 else 10

    @classmethod
    def objects(cls, point: str) -> Iterable[Object]:
        widths = dict(zip(("qk_head_dim", "v_head_dim"), head_dims(point), strict=True))
        yield "mla_prefill", widths
        for options in ({}, {"deterministic": True}, {"shared_rope": True}):
            yield "mla_prefill_backward", widths | options
        if len(read_point(point)[0]) == 1:
            for kernel in ("mla_prefill", "mla_prefill_backward"):
                yield kernel, widths | {"selection": True}

    def forward(self, call: Any, inputs: list[Any], **options: Any) -> Any:
        """out, or out and lse, of one of our operations."""
        longest = max(self.lens)
        offsets = {"cu_seqlens_q": self.cu, "cu_seqlens_kv": self.cu, "max_q_len": longest, "max_kv_len": longest}
        return call(*inputs, **offsets, softmax_scale=self.scale, **options)

    def ours(self) -> dict[str, Run]:
        whole = (self.q, self.k, self.v)
        kv = torch.cat([self.k[..., : self.nope], self.v], -1)
        found = {
            "tsmla": self.operator("mla_prefill", *whole),
            "tsmla_deterministic": self.operator("mla_prefill", *whole, deterministic=True),
            "tsmla_kv": self.operator("mla_prefill_kv", self.q, kv, self.k[:, 0, self.nope :].contiguous()),
        }
        if len(self.lens) == 1:
            found[SELECTION] = self.operator("mla_prefill", *whole, selected=self.selection)
        return found

    @functools.cached_property
    def selection(self) -> tuple[Any, Any]:
        """The keys that the one request's tokens select, as bits: SELECTED keys, or half as many as the request has
        tokens if that is fewer; and each token's row of bits, -1 for tokens that see no more keys than that."""
        (tokens,) = self.lens
        at = torch.arange(tokens, device=device(), dtype=torch.int32)
        count = min(SELECTED, tokens // 2)
        bits = tsmla_bridge.selection_bits(draw_prompt(tokens, count, 0.0), tokens)
        return bits, torch.where(at < count, -1, at)

    def operator(
        self, name: str, *inputs: Any, deterministic: bool = False, selected: tuple[Any, Any] = (None, None)
    ) -> Run:
        """The backward operator of one of our operations."""
        selection = dict(zip(("selection", "selection_rows"), selected, strict=True))
        out, lse = self.forward(getattr(tsmla_bridge, name), [*inputs], return_lse=True, **selection)
        scales, longest = torch.tensor([self.scale, 1.0], device=device()), max(self.lens)
        given = (self.d_out, torch.zeros_like(lse), out, lse, *inputs, self.cu, self.cu, *selected, None)
        options = (scales, 1.0, 1.0, longest, longest, True, deterministic, False, None)
        return functools.partial(getattr(torch.ops.tsmla, f"{name}_backward"), *given, *options)

    def of_peer(self, name: str) -> Run:
        if name == "fa4":
            out, lse = self.forward(tsmla_bridge.mla_prefill, [self.q, self.k, self.v], return_lse=True)
            saved = (out, lse, self.d_out)
            return dense.fa4_gradient((self.q, self.k, self.v), saved, self.cu, max(self.lens), self.scale)
        if len(self.lens) > 1:
            raise ValueError("cuDNN's gradient is timed for one request")
        return dense.cudnn_gradient(self.q, self.k, self.v, self.d_out, self.scale)

    def row(self, name: str, us: float, results: Any) -> dict[str, Any]:
        flops = self.heads * sum(n * (n + 1) // 2 for n in self.lens) * 2 * (3 * self.dims[0] + 2 * self.dims[1])
        errors = errors_of(name, CHECKED + WIDE * self.point.endswith(WIDE))
        case = {"point": self.point, "length": max(self.lens), "b": len(self.lens), "h": self.heads}
        case |= {"head_dims": list(self.dims), "mode": MODES.get(name, "default"), "tflops": round(flops / us / 1e6, 1)}
        return case | dict(zip(("dq_err", "dk_err", "dv_err"), errors, strict=True))


@functools.cache
def _checked(point: str, *, selects: bool) -> tuple[PrefillBackward, list[Any]]:
    """The case whose errors are measured, and its gradients in float64 by the definition."""
    case = PrefillBackward(point)
    wide = [x.double().requires_grad_() for x in (case.q, case.k, case.v)]
    selected = dict(zip(("selection", "selection_rows"), case.selection, strict=True)) if selects else {}
    out = case.forward(tsmla_bridge.mla_prefill, wide, implementation="reference", **selected)
    return case, [*torch.autograd.grad(out, wide, case.d_out.double())]


@functools.cache
def errors_of(name: str, point: str) -> list[float]:
    """Relative errors of a function's gradients of q, k and v at a point."""
    case, (d_q, d_k, d_v) = _checked(point, selects=name == SELECTION)
    ours = case.ours()
    got = list((ours[name] if name in ours else case.of_peer(name))())[:3]
    if name == "tsmla_kv":  # its gradient of the shared rope columns is a sum over heads
        d_kv, rope = got[1], got[2]
        got = [got[0], torch.cat([d_kv[..., : case.nope].flatten(), rope.flatten()]), d_kv[..., case.nope :]]
        d_k = torch.cat([d_k[..., : case.nope].flatten(), d_k[..., case.nope :].sum(1).flatten()])
    pairs = zip(got, (d_q, d_k, d_v), strict=True)
    return [float(f"{float((g.double() - w).norm() / w.norm()):.3e}") for g, w in pairs]
