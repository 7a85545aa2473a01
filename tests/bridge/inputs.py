"""Decode inputs as torch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tsmla_bridge
from tests.oracles import attention as oracle
from tests.oracles.inputs import Paged, paged


def tensor(array: Any) -> torch.Tensor:
    """A tensor on the CPU of a numpy (ml_dtypes too) or jax array, with memory of its own."""
    return torch.from_dlpack(jax.device_put(array, jax.devices("cpu")[0])).clone()


def tensors_of(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`tensor` of each."""
    return {name: tensor(value) for name, value in arrays.items()}


class TorchInAGraph:
    """torch for a module that CUDA graphs capture: it makes no tensor from the host's memory."""

    def __getattr__(self, name: str) -> Any:
        assert name not in ("tensor", "as_tensor", "from_numpy"), f"torch.{name} copies from the host"
        return getattr(torch, name)


@dataclass(frozen=True)
class Inputs:
    """A call of mla_decode on torch tensors and what it must give, by the numpy oracle in float64."""

    case: Paged
    q: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    options: dict[str, Any]

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.kv_cache, self.block_tables, self.seq_lens

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The arrays by argument."""
        return dict(zip(("q", "kv_cache", "block_tables", "seq_lens"), self.arrays, strict=True))

    def want(self, **changed: Any) -> tuple[np.ndarray, np.ndarray]:
        """out and lse, packed as q is; rows of no request 0 and -inf."""
        case = self.case
        outs, lses = oracle.decode(
            case.per_request(), case.kv_cache, case.block_tables, case.seq_lens, latent_dim=case.latent_dim,
            **({"scale": case.scale} | changed),
        )  # fmt: skip
        if case.cu_seqlens_q is None:
            return np.stack(outs), np.stack(lses)
        padding = self.q.shape[0] - int(case.cu_seqlens_q[-1])
        outs.append(np.zeros((padding, *outs[0].shape[1:])))
        lses.append(np.full((padding, *lses[0].shape[1:]), -np.inf))
        return np.concatenate(outs), np.concatenate(lses)


def inputs(seq_lens: list[int], **shape: Any) -> Inputs:
    """As tests.oracles.inputs.paged."""
    case = paged(seq_lens, **shape)
    options = case.options()
    if case.cu_seqlens_q is not None:
        options["cu_seqlens_q"] = tensor(case.cu_seqlens_q)
    arrays = (case.q, case.kv_cache, case.block_tables, case.seq_lens)
    return Inputs(case, *map(tensor, arrays), options)


def assert_close(got: torch.Tensor, want: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(got.double().numpy(), want, rtol=tolerance, atol=tolerance)


BF16 = 2**-7  # bf16's own step, of results of size one
KERNEL = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16", "latent_dim": 256, "rope_dim": 64, "heads": 3}


def served(seq_lens: list[int], **shape: Any) -> Inputs:
    """Inputs that the decode kernel serves, as small as it takes them."""
    return inputs(seq_lens, **(KERNEL | shape))


def attend(case: Inputs, **changed: Any) -> Any:
    """mla_decode of the case with lse, some of its arguments changed."""
    return tsmla_bridge.mla_decode(**(case.named | case.options | {"return_lse": True} | changed))


def assert_right(got: Any, case: Inputs, **changed: Any) -> None:
    """out and lse of a bf16 call are those of the oracle."""
    for result, want, tolerance in zip(got, case.want(**changed), (BF16, 1e-4), strict=True):
        assert_close(result, want, tolerance)


def as_torch(value: Any) -> Any:
    """Arrays as tensors and dtypes as torch's; a list of arrays as a list of tensors."""
    if isinstance(value, jax.Array | np.ndarray):
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else tensor(value)
    if isinstance(value, np.bool_):
        return value
    if isinstance(value, type) or hasattr(value, "dtype"):
        return getattr(torch, np.dtype(value).name)
    return [as_torch(part) for part in value] if isinstance(value, list) and value else value


def said(error: type[Exception], function: Any, arguments: dict[str, Any]) -> str:
    with pytest.raises(error) as caught:
        function(**arguments)
    return str(caught.value)
