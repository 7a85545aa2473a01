"""A stand-in for the GPU: CPU tensors pass for CUDA ones, and a launch reads and writes their memory by address.

The stand-in sees what the compiled kernel would see, addresses and sizes alone, so operands that are mixed up, views
that are misread and workspaces that overlap show here.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tsmla_bridge import decode, devices, kernels, kv_cache, merge, reference, scales
from tsmla_bridge.tensors import DTYPES
from tsmla_kernels import contract, launch
from tsmla_kernels.catalog import Config, Kernel, Operand

NUM_SMS = 4


@dataclass
class Gpu:
    """What the stand-in saw: the operands of every launch as (stream, {name: tensor over its memory}), and how often a
    kernel was loaded. `stream` is the current stream of each thread; `capture` its capture's number, None without."""

    launches: list[tuple[int, dict[str, torch.Tensor]]] = field(default_factory=list)
    loads: int = 0
    state: threading.local = field(default_factory=threading.local)
    capability: tuple[int, int] = (9, 0)
    borrowed: dict[int, torch.Tensor] = field(default_factory=dict)

    def borrow(self, size: int, stream: int) -> int:
        """Memory as the allocator gives it, at addresses as even as a GPU's."""
        memory = torch.empty(size + 512, dtype=torch.uint8)
        address = memory.data_ptr() + -memory.data_ptr() % 512
        self.borrowed[address] = memory
        return address

    def give_back(self, address: int) -> None:
        del self.borrowed[address]

    @property
    def stream(self) -> int:
        return getattr(self.state, "stream", 0)

    @stream.setter
    def stream(self, value: int) -> None:
        self.state.stream = value

    @property
    def capture(self) -> int | None:
        return getattr(self.state, "capture", None)

    @capture.setter
    def capture(self, value: int | None) -> None:
        self.state.capture = value


def over_memory(address: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor over memory that someone else owns."""
    count = 1
    for size in shape:
        count *= size
    element = DTYPES[dtype]
    if not count:
        return torch.empty(shape, dtype=element)
    buffer = (ctypes.c_uint8 * (count * element.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(element).view(shape)


class StandInLauncher(launch.Launcher):
    """A Launcher whose kernel is the reference, on the memory that its arguments point to."""

    def __init__(self, gpu: Gpu, kernel: Kernel, config: Config) -> None:
        self.gpu, self.config = gpu, config
        self.name, self.operands, self._bound = kernel.name, kernel.operands(config), {}
        gpu.loads += 1

    def _run(self, arguments: ctypes.c_void_p, count: ctypes.c_size_t) -> int:  # type: ignore[override]
        assert count.value == len(self.operands) + 2 and arguments.value is not None
        pointers = (ctypes.c_void_p * count.value).from_address(arguments.value)
        stream = ctypes.c_int64.from_address(pointers[0]).value
        found = {operand.name: self._operand(operand, pointers[1 + i]) for i, operand in enumerate(self.operands)}
        self.gpu.launches.append((stream, found))
        getattr(self, f"_{self.name}")(found)
        return 0

    def _operand(self, operand: Operand, pointer: int) -> torch.Tensor:
        descriptor = ctypes.c_int64.from_address(pointer).value
        address, sizes = (ctypes.c_int64 * 2).from_address(descriptor)
        shape = tuple((ctypes.c_int64 * len(operand.shape)).from_address(sizes))
        assert address % operand.align == 0
        return over_memory(address, shape, operand.dtype)

    def _mla_decode(self, of: dict[str, torch.Tensor]) -> None:
        config = self.config
        for name in ("partial_out", "partial_lse", "split_info"):
            of[name].view(torch.uint8).fill_(0xFF)  # what else lies there is spoilt
        batch = of["seq_lens"].shape[0]
        rows = of["q"].shape[0]
        spec = contract.DecodeSpec(
            batch=batch,
            total_q_len=rows // config.num_heads,
            max_q_len=config.max_q_len,
            num_heads=config.num_heads,
            latent_dim=config.latent_dim,
            rope_dim=config.rope_dim,
            num_pages=of["kv_cache"].shape[0],
            page_size=config.page_size,
            max_pages=of["block_tables"].shape[1],
            q_dtype=config.dtype,
            kv_dtype=config.cache_dtype,
            ragged=config.ragged,
            causal=config.causal,
            return_lse=True,
            batch_invariant=config.batch_invariant,
        )
        q = of["q"].view(-1, config.num_heads, config.head_dim)
        offsets = of["cu_seqlens_q"] if config.ragged else None
        out, lse = reference.mla_decode(
            spec, q, of["kv_cache"], of["block_tables"], of["seq_lens"], offsets, *of["scales"]
        )
        written = torch.ones(len(q), dtype=torch.bool)
        if offsets is not None:
            written = torch.zeros(len(q), dtype=torch.bool)
            for first, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                written[first : min(stop, first + config.max_q_len)] = True
        of["out"].view(-1, config.num_heads, config.latent_dim)[written] = out[written]
        of["lse"].view(-1, config.num_heads)[written] = lse[written]

    def _mla_prefill(self, of: dict[str, torch.Tensor]) -> None:
        for name in ("plan", "progress"):
            of[name].view(torch.uint8).fill_(0xFF)
        q, k, v = of["q"], of["k"], of["v"]
        longest = 1 << 20
        spec = contract.prefill_spec(
            q=contract.Array(tuple(q.shape), self.config.dtype),
            k=contract.Array(tuple(k.shape), self.config.dtype),
            v=contract.Array(tuple(v.shape), self.config.dtype),
            cu_seqlens_q=contract.Array(tuple(of["cu_seqlens_q"].shape), "int32"),
            cu_seqlens_kv=contract.Array(tuple(of["cu_seqlens_kv"].shape), "int32"),
            max_q_len=longest,
            max_kv_len=longest,
            softmax_scale=1.0,
            causal=self.config.causal,
        )
        out, lse = reference.mla_prefill(spec, q, k, v, of["cu_seqlens_q"], of["cu_seqlens_kv"], *of["scales"])
        of["out"].copy_(out)
        of["lse"].copy_(lse)

    def _write_kv_cache(self, of: dict[str, torch.Tensor]) -> None:
        config = self.config
        assert of["new_kv_cache"].data_ptr() == of["kv_cache"].data_ptr()
        k_rope = of["k_rope"][:, : config.rope_dim] if config.rope_dim else None
        latent, slots = of["latent"][:, : config.latent_dim], of["slot_mapping"]
        kv_cache.write(of["kv_cache"], latent, k_rope, slots, of["kv_scale"][0], "reference")

    def _gather_kv_cache(self, of: dict[str, torch.Tensor]) -> None:
        arrays = (of["kv_cache"], of["block_tables"], of["starts"], of["lens"])
        dtype = of["out"].dtype
        of["out"].copy_(kv_cache.gather(*arrays, len(of["out"]), of["kv_scale"][0], dtype, "reference"))

    def _merge_attention_states(self, of: dict[str, torch.Tensor]) -> None:
        parts = range(self.config.parts)
        outs = [of[f"out_{i}"][:, : self.config.head_dim] for i in parts]
        out, lse = merge.run(outs, [of[f"lse_{i}"] for i in parts], "reference")
        of["out"].copy_(out)
        of["lse"].copy_(lse)


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """No plan, kernel or scale of another test."""
    kept = (decode._plans, decode._latest, kernels._loaded, scales._of_stream, scales._of_capture)
    for cache in kept:
        cache.clear()
    yield
    for cache in kept:
        cache.clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """From here on CPU tensors are on a Hopper GPU that runs the stand-in."""
    there = Gpu()
    monkeypatch.setattr(devices, "kind", lambda device: "cuda")
    monkeypatch.setattr(devices, "capability", lambda index: there.capability)
    monkeypatch.setattr(devices, "num_sms", lambda index: NUM_SMS)
    monkeypatch.setattr(devices, "current_device", lambda: -1)
    monkeypatch.setattr(devices, "current_stream", lambda index: there.stream)
    monkeypatch.setattr(devices, "torch_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(
        devices, "new_tensor", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    )
    monkeypatch.setattr(devices, "borrow", there.borrow)
    monkeypatch.setattr(devices, "give_back", there.give_back)
    monkeypatch.setattr(devices, "is_capturing", lambda: there.capture is not None)
    monkeypatch.setattr(devices, "capture_id", lambda stream: there.capture)
    monkeypatch.setattr(launch, "runtime_library", lambda: Path("there"))
    monkeypatch.setattr(kernels, "_load", lambda kernel, config, index: StandInLauncher(there, kernel, config))
    yield there
    assert not there.borrowed


@contextlib.contextmanager
def on_stream(gpu: Gpu, stream: int, capture: int | None = None) -> Iterator[None]:
    """Calls of this thread are on `stream` meanwhile, captured as number `capture` if there is one."""
    before = gpu.stream, gpu.capture
    gpu.stream, gpu.capture = stream, capture
    try:
        yield
    finally:
        gpu.stream, gpu.capture = before
