"""Memory for a kernel's intermediate results: sized by a function, owned by the caller, one for each stream."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from tsmla_bridge.runtime import devices
from tsmla_bridge.runtime.tensors import dtype_name
from tsmla_kernels import contract
from tsmla_kernels.catalog import MLA_DECODE
from tsmla_kernels.kernel import ITEMSIZE
from tsmla_kernels.sm90.decode import config as sm90_decode
from tsmla_kernels.sm90.sparse import config as sm90_sparse
from tsmla_kernels.sm90.sparse import union_config as sm90_union
from tsmla_kernels.sm90.sparse.record import SPARSE_MLA, SPARSE_MLA_UNION, Serving, workspaces_of
from tsmla_kernels.topk import chunks as sm90_topk

ALIGN = 256  # bytes, of every array in a workspace: cudaMalloc's alignment, and more than any operand needs

Shapes = Mapping[str, tuple[tuple[int, ...], str]]


class Layout:
    """Named arrays one after the other.

    offsets: how many bytes from the start each array begins, by name.
    size: bytes in all.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.offsets: dict[str, int] = {}
        self.size = 0
        for name, (shape, dtype) in shapes.items():
            self.offsets[name] = self.size
            count = ITEMSIZE[dtype]
            for length in shape:
                count *= length
            self.size += -(-count // ALIGN) * ALIGN


class Workspace:
    """Memory for the kernels' intermediate results, for calls on one stream, one after the other.

    With it, and with out= (and lse= if it is asked for), Hopper's kernels of mla_decode and sparse_mla allocate no
    memory for results, final or intermediate, except for greatest logits. Calls on different streams may run at the
    same time and would write over each other, so each stream needs its own: a workspace belongs to the stream of its
    first call, and a call on another raises until `release` is called. The streams of calls that are captured into a
    CUDA graph are not checked: graphs that are replayed at the same time need workspaces of their own.

    Args:
      size: bytes; decode_workspace_size, sparse_workspace_size and indexer_topk_workspace_size say how many a call
        needs.
      device: the memory's device; by default the current CUDA device, or the CPU if torch can use no GPU. Calls on a
        CPU take a workspace and don't need it, so that a program for a GPU can be tested without one.

    Raises:
      TypeError, ValueError: size is no int, or negative. For device torch raises its own errors.
    """

    def __init__(self, size: int, device: torch.device | str | int | None = None) -> None:
        count = contract.static_int("size", size, maximum=None)
        self.buffer = torch.empty(count, dtype=torch.uint8, device=_default_device() if device is None else device)
        self._stream: int | None = None

    @classmethod
    def of(cls, buffer: torch.Tensor) -> Workspace:
        """A workspace for one call in `buffer`, a contiguous uint8 tensor."""
        self = cls.__new__(cls)
        self.buffer, self._stream = buffer, None
        return self

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.buffer.numel()

    def release(self) -> None:
        """Let another stream use it. Its work must be ordered after this stream's (Stream.wait_stream)."""
        self._stream = None

    def take(self, op: str, size: int, device: torch.device, stream: int) -> int:
        """The address of `size` bytes for a call on `stream`. ValueError if the workspace is too small, on another
        device, or another stream's."""
        if self.buffer.numel() < size:
            raise ValueError(f"workspace: got {self.size} bytes; this call of {op} needs {size}")
        if self.buffer.device != device:
            raise ValueError(f"workspace: got one on {self.buffer.device}; it must be on q's device, {device}")
        if self._stream != stream and not devices.is_capturing():
            if self._stream is not None:
                raise ValueError(
                    f"workspace: got the one of stream {self._stream:#x} for a call on stream {stream:#x}; each stream"
                    " needs its own (or order the streams and call release())"
                )
            self._stream = stream
        return self.buffer.data_ptr()


def check_workspace(workspace: object) -> None:
    """TypeError unless it is a Workspace or None."""
    if workspace is not None and not isinstance(workspace, Workspace):
        raise contract.not_an_array("workspace", workspace, "a tsmla_bridge.Workspace, or None")


def decode_layout(config: sm90_decode.DecodeConfig, num_sms: int, batch: int, max_pages: int, rows: int) -> Layout:
    """The workspaces of a call's largest launch, and an lse for calls that return none."""
    largest = max((stop - first for first, stop in sm90_decode.launches(config, batch, max_pages)), default=0)
    shapes: dict[str, Any] = dict(sm90_decode.workspace_shapes(config, num_sms, largest, max_pages))
    return Layout({**shapes, "lse": ((rows,), "float32")})


def sparse_layout(serving: Serving, num_sms: int, num_tokens: int, num_selected: int) -> Layout:
    """The workspaces of a call's largest launch, and an lse for calls that return none."""
    largest = max((stop - first for first, stop in serving.launches(num_tokens, num_selected)), default=0)
    shapes: dict[str, Any] = dict(workspaces_of(serving.config, num_sms, largest, num_selected))
    return Layout({**shapes, "lse": ((num_tokens * serving.config.num_heads,), "float32")})


def _default_device() -> str:
    """The device that None stands for."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _num_sms(device: torch.device | str | int | None) -> int:
    """The number of multiprocessors of the CUDA device that an argument names, or of the current one for None; 0 for a
    CPU. ValueError if torch can't use the device, or if it is of another kind."""
    try:
        named = torch.device(_default_device() if device is None else device)
        if named.type == "cpu":
            return 0
        if named.type == "cuda":
            return devices.num_sms(devices.index_of(named))
        why = "its number of multiprocessors decides"
    except (AssertionError, RuntimeError) as error:  # no device's name, torch without CUDA, no GPU, or too few
        why = str(error).splitlines()[0]
    raise ValueError(f"device: got {device}; legal: cpu, or a CUDA device that torch can use ({why})")


def sparse_workspace_size(
    *,
    max_tokens: int,
    num_heads: int,
    max_selected: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    device: torch.device | str | int | None = None,
) -> int:
    """Bytes that sparse_mla needs at most, for calls of up to max_tokens query tokens, over caches of any layout.

    On an H200 the partial results of any number of tokens take some 18 MB, or 35 with up to 32 heads. With 8, 16 or 32
    heads tokens may share gathers. This takes 52 to 70 MB, plus up to 164 bytes for each token, plus up to 3.2 bytes
    for each column of each token's indices. The partial results of batch_invariant calls take some 256 MiB at most,
    because many tokens take several launches. Each token and head takes 4 bytes more.

    Args:
      max_tokens: T.
      num_heads: H.
      max_selected: K of indices, which matters for batch_invariant calls and for tokens that share gathers.
      dtype: q's dtype.
      batch_invariant: as the calls have it.
      device: its number of multiprocessors decides; by default the current CUDA device, or the CPU where torch can use
        no GPU. A CPU needs 0 bytes.

    Raises:
      TypeError, ValueError: a size is no int, or is too small; torch can't use the device.
    """
    max_tokens = contract.static_int("max_tokens", max_tokens)
    num_heads = contract.static_int("num_heads", num_heads, minimum=1)
    max_selected = contract.static_int("max_selected", max_selected)
    if not (sms := _num_sms(device)):
        return 0
    whole = sm90_sparse.SparseConfig(dtype_name(dtype), num_heads, batch_invariant=batch_invariant)
    # Smaller tiles are more tiles, and a call with fewer columns or without greatest logits may put more tokens into a
    # launch: each of these may need more memory.
    configs = [
        dataclasses.replace(whole, tile_rows=rows, max_logits=max_logits)
        for rows, max_logits in itertools.product((whole.tile_rows, sm90_sparse.FEW_HEADS), (False, True))
    ]
    columns = range(max(max_selected, 1), 0, -whole.shape.block) if batch_invariant else (1,)
    calls = [(Serving(SPARSE_MLA, config), selected) for config, selected in itertools.product(configs, columns)]
    if not batch_invariant:
        for union in sm90_union.union_configs(dtype_name(dtype), num_heads):
            most = min(max(max_selected, 1), sm90_union.MOST_COLUMNS)
            calls.append((Serving(SPARSE_MLA_UNION, dataclasses.replace(union, max_logits=True)), most))
    return max(sparse_layout(serving, sms, max_tokens, selected).size for serving, selected in calls)


def indexer_topk_workspace_size(*, max_tokens: int, max_keys: int) -> int:
    """Bytes that indexer_topk needs at most: 128 MiB for the logits of a chunk of tokens (less for few tokens, more
    from 2,097,153 keys on), and 8 for each token.

    Args:
      max_tokens: T.
      max_keys: M * Z of the block table.

    Raises:
      TypeError, ValueError: an argument is no int, or negative.
    """
    return sm90_topk.workspace_bytes(
        contract.static_int("max_tokens", max_tokens), contract.static_int("max_keys", max_keys)
    )


def decode_workspace_size(
    *,
    max_batch: int,
    num_heads: int,
    max_q_len: int = 1,
    page_size: int = 64,
    latent_dim: int = 512,
    rope_dim: int = 64,
    max_pages: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    ragged: bool = False,
    causal: bool = True,
    batch_invariant: bool = False,
    device: torch.device | str | int | None = None,
) -> int:
    """Bytes that mla_decode needs at most, for calls of up to max_batch requests of up to max_q_len query tokens, and,
    if the queries are ragged, of up to max_batch * max_q_len rows, padding included.

    The partial results of batch_invariant calls take some 256 MiB at most, unless one request alone needs more: larger
    batches take several launches.

    Args:
      max_batch: B.
      num_heads: H.
      max_q_len: S, or the bound of ragged queries.
      page_size, latent_dim, rope_dim: Z, L and R.
      max_pages: M of the block table. It matters only for batch_invariant calls, and a narrower table may need more.
      dtype: q's dtype.
      kv_dtype: the cache's dtype; None for q's.
      ragged: whether the calls give cu_seqlens_q.
      causal, batch_invariant: as the calls have them.
      device: its number of multiprocessors decides; by default the current CUDA device, or the CPU where torch can use
        no GPU. A CPU needs 0 bytes.

    Raises:
      TypeError, ValueError: a size is no int, or is too small; torch can't use the device.
      NotImplementedError: no kernel runs such calls, with the reasons.
    """
    max_batch, max_pages = contract.static_int("max_batch", max_batch), contract.static_int("max_pages", max_pages)
    num_heads = contract.static_int("num_heads", num_heads, minimum=1)
    max_q_len = contract.static_int("max_q_len", max_q_len, minimum=1)
    if not (sms := _num_sms(device)):
        return 0
    size = 0
    for q_len in range(1, max_q_len + 1):
        spec = contract.DecodeSpec(
            batch=max_batch,
            total_q_len=max_batch * q_len,
            max_q_len=q_len,
            num_heads=num_heads,
            latent_dim=latent_dim,
            rope_dim=rope_dim,
            num_pages=1,
            page_size=page_size,
            max_pages=max_pages,
            q_dtype=dtype_name(dtype),
            kv_dtype=dtype_name(kv_dtype or dtype),
            ragged=ragged,
            causal=causal,
            batch_invariant=batch_invariant,
        )
        if reasons := MLA_DECODE.reasons(spec):
            raise contract.not_runnable("mla_decode", "cute", reasons)
        config = sm90_decode.decode_config(spec)
        layout = decode_layout(config, sms, max_batch, max_pages, max_batch * q_len * num_heads)
        size = max(size, layout.size)
    return size
