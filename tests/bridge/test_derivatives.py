"""The part of docs/guides/derivatives.md's table that is about torch and not about prefill, whose tests are
test_gradient.py and test_prefill_kv.py."""

from __future__ import annotations

import pytest
import torch

import tsmla_bridge
from tests.emulator.launcher import Gpu

TABLES = torch.tensor([[1, 0]], dtype=torch.int32)
STARTS, LENS = torch.tensor([2], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)


def gather(cache: torch.Tensor, implementation: str | None = None) -> torch.Tensor:
    return tsmla_bridge.gather_kv_cache(
        cache, TABLES, STARTS, LENS, total_len=22, kv_scale=0.5, implementation=implementation
    )


def test_a_gather_is_differentiated_in_torch_operations(gpu: Gpu) -> None:
    cache = torch.randn(2, 16, 64).bfloat16()
    plain = gather(cache)
    assert len(gpu.launches) == 1
    derived = gather(cache.requires_grad_())
    assert len(gpu.launches) == 1 and torch.equal(derived, plain)
    derived.float().sum().backward()
    want = torch.zeros(2, 16, 64)
    want[1, 2:], want[0, :6] = 0.5, 0.5
    assert cache.grad is not None and torch.equal(cache.grad.float(), want)
    with pytest.raises(NotImplementedError, match="can't run this call: a derivative is asked for; the kernel has"):
        gather(cache, "cute")
    with torch.no_grad():
        gather(cache, "cute")
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("name", ["gather_kv_cache", "merge_attention_states", "mla_decode"])
def test_under_torch_compile_these_are_refused(name: str) -> None:
    torch._dynamo.reset()
    cache = torch.randn(2, 16, 64, requires_grad=True)
    outs, lses = torch.randn(2, 3, 1, 8, requires_grad=True), torch.randn(2, 3, 1)
    calls = {
        "gather_kv_cache": lambda: gather(cache),
        "merge_attention_states": lambda: tsmla_bridge.merge_attention_states(outs, lses)[0],
        "mla_decode": lambda: tsmla_bridge.mla_decode(
            cache[:1, :1, None], cache.detach(), TABLES, LENS, softmax_scale=0.3, latent_dim=48
        ),
    }
    instead = "train through expanded" if name == "mla_decode" else "an eager call has one"
    message = f"{name} has no derivative in this implementation; {instead}"
    # torch differentiates while it compiles, and wraps what it meets there.
    with pytest.raises((NotImplementedError, torch._dynamo.exc.BackendCompilerFailed), match=message):
        torch.compile(calls[name], fullgraph=True, backend="aot_eager")().sum().backward()
    calls[name]().sum().backward()


def test_a_write_is_refused() -> None:
    cache, slots = torch.zeros(2, 16, 64), torch.tensor([17, 3], dtype=torch.int32)
    latent = torch.randn(2, 64, requires_grad=True)
    message = "write_kv_cache has no derivative in this implementation; call it under torch.no_grad"
    with pytest.raises(NotImplementedError, match=message):
        tsmla_bridge.write_kv_cache(cache, latent, None, slots)
    written = tsmla_bridge.write_kv_cache(cache, latent.detach(), None, slots)
    assert not written.requires_grad and torch.equal(written.view(32, 64)[[17, 3]], latent.detach())
