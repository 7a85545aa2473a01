"""A stand-in for the GPU that the bridge runs on: CPU tensors pass for CUDA ones, and a launch reads and writes their
memory by address.

The stand-in sees what the compiled kernel would see, addresses and sizes alone, so operands that are mixed up, views
that are misread and workspaces that overlap show here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import tsmla_bridge
from tests.emulator import blackwell, blackwell_selected
from tests.emulator.sparse import call_of
from tsmla_bridge import reference, sparse_reference
from tsmla_bridge.ops.sparse_inputs import SparseInputs
from tsmla_bridge.runtime import devices, loaded_kernels
from tsmla_bridge.runtime.tensors import DTYPES
from tsmla_kernels import launch
from tsmla_kernels.contract import Array, PrefillSpec, decode_spec, prefill_spec
from tsmla_kernels.contract.sparse import sparse_mla_spec
from tsmla_kernels.kernel import Config, Kernel, Operand

NUM_SMS = 4  # more than one, which would have no pieces to combine

Operands = dict[str, torch.Tensor]


@dataclass
class Gpu:
    """What the stand-in saw: the operands of every launch as (stream, {name: tensor over its memory}), and how often a
    kernel was loaded. `stream` is the current stream of each thread; `capture` its capture's number, None without.
    Launches are only recorded while `runs` is False."""

    launches: list[tuple[int, Operands]] = field(default_factory=list)
    loads: int = 0
    runs: bool = True
    state: threading.local = field(default_factory=threading.local)
    capability: tuple[int, int] = (9, 0)
    borrowed: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def operands(self) -> Operands:
        """Of the latest launch."""
        return self.launches[-1][1]

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

    @contextlib.contextmanager
    def on_stream(self, stream: int, capture: int | None = None) -> Iterator[None]:
        """Calls of this thread are on `stream` meanwhile, captured as number `capture` if there is one."""
        before = self.stream, self.capture
        self.stream, self.capture = stream, capture
        try:
            yield
        finally:
            self.stream, self.capture = before


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
        self.gpu, self.kernel, self.config = gpu, kernel, config
        self.name, self.operands, self._bound = kernel.name, kernel.operands(config), {}
        gpu.loads += 1

    def _run(self, arguments: ctypes.c_void_p, count: ctypes.c_size_t) -> int:  # type: ignore[override]
        assert count.value == len(self.operands) + 2 and arguments.value is not None
        pointers = (ctypes.c_void_p * count.value).from_address(arguments.value)
        stream = ctypes.c_int64.from_address(pointers[0]).value
        operands = {operand.name: self._operand(operand, pointers[1 + i]) for i, operand in enumerate(self.operands)}
        self.gpu.launches.append((stream, operands))
        if self.gpu.runs:
            getattr(self, f"_{self.name}")(operands)
        return 0

    def _operand(self, operand: Operand, pointer: int) -> torch.Tensor:
        descriptor = ctypes.c_int64.from_address(pointer).value
        address, sizes = (ctypes.c_int64 * 2).from_address(descriptor)
        shape = tuple((ctypes.c_int64 * len(operand.shape)).from_address(sizes))
        assert address % operand.align == 0
        return over_memory(address, shape, operand.dtype)

    def _in_one(self, operands: Operands) -> Operands:
        """The operands with q [N, D], if it is split."""
        config, q = self.config, operands["q"]
        if not getattr(config, "split_q", False):
            return operands
        if config.heads_first:
            q = q.transpose(0, 1).reshape(-1, q.shape[-1])
        # of the rows of q_rope only the first columns
        return operands | {"q": torch.cat((q, operands["q_rope"][:, : config.head_dim - q.shape[-1]]), -1)}

    def _mla_decode(self, operands: Operands) -> None:
        config = self.config
        for name in ("partial_out", "partial_lse", "split_info"):
            operands[name].view(torch.uint8).fill_(0xFF)  # anything else that lies there is spoilt
        out, lse = (operands[name].view(-1, config.num_heads, *operands[name].shape[1:]) for name in ("out", "lse"))
        q = self._in_one(operands)["q"].view(-1, config.num_heads, config.head_dim)
        offsets = operands["cu_seqlens_q"] if config.ragged else None
        written = torch.ones(len(q), dtype=torch.bool)
        if offsets is None:
            q = q.view(-1, config.max_q_len, *q.shape[1:])
        else:
            written = torch.zeros(len(q), dtype=torch.bool)
            for first, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                written[first : min(stop, first + config.max_q_len)] = True
        tensors = {"q": q, **{name: operands[name] for name in ("kv_cache", "block_tables", "seq_lens")}}
        visible = operands["visible_lens"].view(q.shape[:-2]) if config.visible_lens else None
        optional = {"cu_seqlens_q": offsets, "visible_lens": visible}
        spec = decode_spec(
            **describe(tensors | {name: tensor for name, tensor in optional.items() if tensor is not None}),
            max_q_len=config.max_q_len,
            softmax_scale=1.0,
            latent_dim=config.latent_dim,
            causal=config.causal or config.visible_lens,
        )
        found = reference.mla_decode(spec, *tensors.values(), offsets, visible, *operands["scales"])
        out[written], lse[written] = (x.view(y.shape)[written] for x, y in zip(found, (out, lse), strict=True))

    def _prefill_call(self, operands: Operands) -> tuple[PrefillSpec, list[torch.Tensor], Operands]:
        """The spec of the call on k and v, and the operands of its definition, by name those of a selection and the
        sinks."""
        inputs = [operands[name] for name in (("q", "kv", "k_rope") if self.config.rope_dim else ("q", "k", "v"))]
        if self.config.rope_dim:
            q, kv, k_rope = inputs
            nope = q.shape[2] - k_rope.shape[1]
            rope = k_rope[:, None].expand(-1, kv.shape[1], -1)
            inputs = [q, torch.cat((kv[..., :nope], rope), -1), kv[..., nope:]]
        inputs[2] = inputs[2][..., : self.config.v_head_dim]
        tensors = dict(zip(("q", "k", "v"), inputs, strict=True))
        tensors |= {name: operands[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
        names = ("selection", "selection_rows", "sinks")
        selected = {name: operands[name] for name in names if name in operands}
        longest = 32 * selected["selection"].shape[1] if "selection" in selected else 1 << 20
        spec = prefill_spec(
            **describe(tensors | selected),
            max_q_len=longest,
            max_kv_len=longest,
            softmax_scale=1.0,
            causal=self.config.causal,
            return_max_logits="max_logits" in operands,
        )
        return spec, [*tensors.values(), *operands["scales"]], selected

    def _mla_prefill(self, operands: Operands) -> None:
        for name in ("plan", "progress"):
            operands[name].view(torch.uint8).fill_(0xFF)
        spec, given, selected = self._prefill_call(operands)
        found = reference.mla_prefill(spec, *given, **selected)
        for name, result in zip(("out", "lse", "max_logits"), found, strict=True):
            if name in operands:
                operands[name].copy_(result)

    def _mla_prefill_backward(self, operands: Operands) -> None:
        for name in ("dq_sum", "row_terms", "turns", "plan", "progress"):
            operands[name].view(torch.uint8).fill_(0xFF)
        spec, given, selected = self._prefill_call(operands)
        saved = (operands[name] for name in ("out", "lse", "dout", "dlse"))
        gradients = reference.mla_prefill_backward(spec, *saved, *given, **selected)
        found = dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=True))
        if self.config.rope_dim:
            dk, nope = found.pop("dk"), found["dq"].shape[2] - self.config.rope_dim
            found["dkv"] = torch.cat((dk[..., :nope], found.pop("dv")), -1)
            found["dk_rope"] = dk[..., nope:].float().sum(1)
        for name, result in found.items():
            if result is not None:
                operands[name].copy_(result)

    def _sparse_mla(self, operands: Operands) -> None:
        for operand in self.operands:
            if operand.output and operand.name not in ("out", "lse", "max_logits"):
                operands[operand.name].view(torch.uint8).fill_(0xFF)
        given = call_of(self.config, self._in_one(operands))
        arrays = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        spec = sparse_mla_spec(**(given | describe(arrays)), return_max_logits=self.config.max_logits)
        found = sparse_reference.sparse_mla(
            spec, *(given.get(name) for name in SparseInputs._fields), operands["scales"]
        )  # fmt: skip
        for name, result in zip(("out", "lse", "max_logits"), found, strict=False):
            operands[name].copy_(result.view(operands[name].shape))

    _sparse_mla_union = _sparse_mla

    def _sparse_mla_backward(self, operands: Operands) -> None:
        for name in ("kv_sum", "row_terms"):
            operands[name].view(torch.uint8).fill_(0xFF)
        given = call_of(self.config, operands)
        arrays = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        spec = sparse_mla_spec(**(given | describe(arrays)))
        saved = [operands[name] for name in ("out", "lse", "d_out", "d_lse")]
        inputs = [given.get(name) for name in SparseInputs._fields]
        found = sparse_reference.sparse_mla_backward(spec, *saved, *inputs, operands["scales"])
        for name, result in zip(("d_q", "d_kv_cache", "d_compressed_kv_cache"), found[:3], strict=True):
            if result is not None:
                operands[name].copy_(result)
        if self.config.sinks:  # the shares of all tokens in the first one
            operands["sink_terms"].zero_()[0] = found[3]

    def _write_kv_cache(self, operands: Operands) -> None:
        config = self.config
        cache, slots = operands["kv_cache"], operands["slot_mapping"]
        assert operands["new_kv_cache"].data_ptr() == cache.data_ptr()
        latent = operands["latent"][:, : config.latent_dim]
        k_rope = operands["k_rope"][:, : config.rope_dim] if config.rope_dim else None
        options = {"kv_scale": operands["kv_scale"][0], "implementation": "reference"}
        tsmla_bridge.write_kv_cache(cache, latent, k_rope, slots, **options)

    def _gather_kv_cache(self, operands: Operands) -> None:
        out = operands["out"]
        found = tsmla_bridge.gather_kv_cache(
            *(operands[name] for name in ("kv_cache", "block_tables", "starts", "lens")), total_len=len(out),
            kv_scale=operands["kv_scale"][0], out_dtype=out.dtype, implementation="reference",
        )  # fmt: skip
        out.copy_(found)

    def _merge_attention_states(self, operands: Operands) -> None:
        outs = [operands[f"out_{i}"][:, : self.config.head_dim] for i in range(self.config.parts)]
        lses = [operands[f"lse_{i}"] for i in range(self.config.parts)]
        found = tsmla_bridge.merge_attention_states(outs, lses, implementation="reference")
        for name, result in zip(("out", "lse"), found, strict=True):
            operands[name].copy_(result)

    def _indexer_logits(self, operands: Operands) -> None:
        outputs = ("logits", "row_lens", "row_requests")
        given = {name: operands[name] for name in operands if name not in outputs}
        if self.config.writes_rows:
            # The arrays have the rows up to the launch's last one; the launch has the last of them.
            through, rows = len(operands["row_lens"]), len(operands["logits"])
            request, lens = reference.seen_keys(given["seq_lens"], given.pop("cu_seqlens_q"), through)
            operands["row_lens"][-rows:], operands["row_requests"][-rows:] = lens[-rows:], request[-rows:]
            given |= {"block_tables": given["block_tables"][request[-rows:]], "seq_lens": lens[-rows:]}
        operands["logits"].copy_(tsmla_bridge.indexer_logits(**given, implementation="reference"))

    def _by_tokenspeeds_emulation(self, operands: Operands) -> None:
        inputs = [jax.dlpack.from_dlpack(operands[each.name].clone()) for each in self.operands if not each.output]
        outputs = [operands[each.name] for each in self.operands if each.output]
        shapes = [tuple(tensor.shape) for tensor in outputs]
        found = blackwell.kernel_call(self.kernel, self.config, inputs, shapes, arch="")
        for tensor, result in zip(outputs[:2], found[:2], strict=True):  # the others are workspaces and scales
            tensor.copy_(torch.from_dlpack(result))

    _mla_decode_sm100 = _mla_prefill_sm100 = _by_tokenspeeds_emulation

    def _indexer_logits_sm100(self, operands: Operands) -> None:
        given = {name: in_numpy(tensor) for name, tensor in operands.items()}
        found = blackwell_selected.logits(given, tuple(operands["logits"].shape))
        operands["logits"].copy_(torch.from_numpy(found))

    def _sparse_mla_sm100(self, operands: Operands) -> None:
        given = {name: in_numpy(tensor) for name, tensor in operands.items()}
        sizes = (len(operands["logit_scale_high"]), len(operands["logit_scale_low"]))
        for name, result in blackwell_selected.attention(given, sizes)._asdict().items():
            operands[name].copy_(torch.from_numpy(result))

    def _selection_bits(self, operands: Operands) -> None:
        given = {name: operands[name] for name in ("lengths", "starts") if name in operands}
        num_keys = 32 * operands["selection"].shape[1]
        tsmla_bridge.selection_bits(
            operands["positions"], num_keys, **given, out=operands["selection"], implementation="reference"
        )

    def _select_topk(self, operands: Operands) -> None:
        config = self.config
        outputs = ("indices", "selection", "counts", "scores")
        given = {name: operands[name] for name in operands if name not in outputs}
        if config.row_requests:
            given["block_tables"] = given["block_tables"][given.pop("row_requests")]
        run = functools.partial(tsmla_bridge.select_topk, k=config.k, order=config.order, implementation="reference")
        if config.scores:
            logits, lens = given["logits"], given["seq_lens"]
            operands["scores"].copy_(sparse_reference.scores_at(logits, run(logits, lens)))
        given |= {"page_size": config.page_size} if config.page_size else {}
        found = run(**given, return_bits=config.bits)
        results = found if isinstance(found, tuple) else (found,)
        for name, result in zip(("selection" if config.bits else "indices", "counts"), results, strict=False):
            operands[name].copy_(result)


def in_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values, those of 16 bits and of e4m3 in float32, which numpy has."""
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def describe(tensors: Operands) -> dict[str, Array]:
    return {name: Array(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in tensors.items()}


def install(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """From here on CPU tensors are on a Hopper GPU that runs the stand-in."""
    gpu = Gpu()
    monkeypatch.setattr(devices, "kind", lambda device: "cuda")
    monkeypatch.setattr(devices, "capability", lambda index: gpu.capability)
    monkeypatch.setattr(devices, "num_sms", lambda index: NUM_SMS)
    monkeypatch.setattr(devices, "current_device", lambda: -1)
    monkeypatch.setattr(devices, "current_stream", lambda index: gpu.stream)
    monkeypatch.setattr(devices, "torch_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(
        devices, "new_tensor", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    )
    monkeypatch.setattr(devices, "borrow", gpu.borrow)
    monkeypatch.setattr(devices, "give_back", gpu.give_back)
    monkeypatch.setattr(devices, "is_capturing", lambda: gpu.capture is not None)
    monkeypatch.setattr(devices, "capture_id", lambda stream: gpu.capture)
    monkeypatch.setattr(launch, "runtime_library", lambda: Path("standin"))
    monkeypatch.setattr(loaded_kernels, "_load", lambda kernel, config, index: StandInLauncher(gpu, kernel, config))
    return gpu
