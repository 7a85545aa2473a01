"""Arrays of more than 2^31 elements: kernels compute their places in 64 bits, or refuse the call. Some blocks of each
grid run on the machine of tests/emulator/ptx, which finds what they touch outside of an array; nothing is behind memory
that nobody touches."""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.ptx import machine
from tests.emulator.ptx.machine import EmulatedKernel, Memory, Order, Part
from tsmla_kernels import launch
from tsmla_kernels.catalog import (
    COMPRESS_WRITE_KV_CACHE,
    INDEXER_LOGITS,
    MLA_DECODE,
    MLA_PREFILL,
    MLA_PREFILL_BACKWARD,
    SELECT_TOPK,
    WRITE_INDEXER_CACHE,
)
from tsmla_kernels.contract import DecodeSpec
from tsmla_kernels.kernel import ITEMSIZE, Config, Kernel, Operand
from tsmla_kernels.options import compress_write_spec, decode_spec, indexer_logits_spec, sparse_mla_spec
from tsmla_kernels.sm90.decode.config import DecodeConfig, decode_reasons, workspace_shapes
from tsmla_kernels.sm90.logits.config import LogitsConfig, logits_reasons
from tsmla_kernels.sm90.prefill.backward.config import BackwardConfig, backward_workspaces
from tsmla_kernels.sm90.prefill.config import PrefillConfig
from tsmla_kernels.sm90.sparse.config import sparse_reasons
from tsmla_kernels.sparse_cache.compress_config import CompressWriteConfig, compress_write_reasons
from tsmla_kernels.sparse_cache.config import IndexerWriteConfig
from tsmla_kernels.topk.config import TopkConfig

pytestmark = pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine")

NORESERVE = 0x4000
"""Linux' MAP_NORESERVE."""

Shape = tuple[int, ...]
NUMPY = {"float32": np.float32, "int32": np.int32, "int64": np.int64, "uint8": np.uint8, "bfloat16": np.uint16}
"""Of the arrays that a test reads or writes; others are bytes."""


class Call:
    """A kernel on arrays of these shapes. Memory costs nothing until it is touched, and is 0 until then."""

    def __init__(self, kernel: Kernel, config: Config, shapes: dict[str, Shape]) -> None:
        self.kernel, self.emulated = kernel, compiled(kernel, config)
        self.operands, self.shapes = kernel.operands(config), shapes
        self.arrays: dict[str, np.ndarray] = {}
        for operand in self.operands:
            if operand.alias is not None:
                self.arrays[operand.name] = self.arrays[operand.alias]
                shapes[operand.name] = shapes[operand.alias]
                continue
            kind = NUMPY.get(operand.dtype, np.uint8)
            size = math.prod(shapes[operand.name]) * ITEMSIZE[operand.dtype]
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
            self.arrays[operand.name] = np.frombuffer(memory, kind, size // kind().nbytes)

    def __getitem__(self, name: str) -> np.ndarray:
        """An array, flat where its elements have no dtype of numpy's."""
        array, (operand,) = self.arrays[name], (each for each in self.operands if each.name == name)
        return array.reshape(self.shapes[name]) if operand.dtype in NUMPY else array

    def run(self, *clusters: int, kernel: str = "", seed: int = 0) -> None:
        """Run these clusters of the kernels whose names contain `kernel`."""

        def start(arguments: object, count: object) -> int:
            written = {self.arrays[o.name].ctypes.data for o in self.operands if o.output}
            memory = [
                Memory(o.name, address, array.nbytes, writable=o.output)
                for o in self.operands
                for array in (self.arrays[o.name],)
                for address in (array.ctypes.data,)
                if o.output or address not in written
            ]
            self.emulated.run(arguments, memory, Order(seed, part=Part(kernel or "kernel", clusters)))
            return 0

        shapes = [self.shapes[operand.name] for operand in self.operands]
        bound = launch.launch_of(self.kernel.name, self.operands, shapes, start, lambda error: None)
        bound(0, [self.arrays[operand.name].ctypes.data for operand in self.operands])
        assert self.emulated.hazards == []


@functools.cache
def compiled(kernel: Kernel, config: Config) -> EmulatedKernel:
    return EmulatedKernel(kernel, config)


def gradient(rope_dim: int, tokens: int, keys: int, heads: int, batch: int = 1) -> Call:
    """The gradient of requests of which the last has all tokens."""
    config = BackwardConfig("bfloat16", rope_dim=rope_dim, deterministic=True)
    widths = {"k": 192, "v": 128} if not rope_dim else {"kv": 256, "k_rope": rope_dim}
    shapes: dict[str, Shape] = {name: (keys, heads, width) for name, width in widths.items()}
    if rope_dim:
        shapes["k_rope"] = (keys, rope_dim)
    shapes |= {f"d{name}": shape for name, shape in shapes.items()}
    shapes |= {name: (tokens, heads, 192) for name in ("q", "dq")}
    shapes |= {name: (tokens, heads, 128) for name in ("out", "dout")}
    shapes |= {name: (tokens, heads) for name in ("lse", "dlse")}
    shapes |= {"cu_seqlens_q": (batch + 1,), "cu_seqlens_kv": (batch + 1,), "scales": (2,)}
    workspaces = backward_workspaces(config, batch, tokens, keys, heads, 4)
    call = Call(MLA_PREFILL_BACKWARD, config, shapes | {name: shape for name, (shape, _) in workspaces.items()})
    call["cu_seqlens_q"][-1], call["cu_seqlens_kv"][-1] = tokens, keys
    return call


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("dq_sum", functools.partial(gradient, rope_dim=0, tokens=400_000, keys=64, heads=128)),
        ("rope_sum", functools.partial(gradient, rope_dim=64, tokens=400_000, keys=10_000_000, heads=1)),
        ("dq_sum", functools.partial(gradient, rope_dim=0, tokens=64, keys=64, heads=1, batch=17_000_000)),
    ],
    ids=["dq", "shared rope columns", "requests without tokens"],
)
@pytest.mark.sampled(3)
def test_the_last_block_zeroes_its_part_of_the_gradients_sums(name: str, call: Callable[[], Call]) -> None:
    """More vectors of four sums than 32 bits count. It also writes its rows' terms, whose array may be as large."""
    made = call()
    sums, tiles, heads = made[name].reshape(-1), *made["row_terms"].shape[1::-1]
    assert sums.size // 4 >= 2**31
    sections = -(-heads // 4)
    blocks = tiles * sections  # that zero
    mine = np.arange((blocks - 1) * 1024, sums.size, blocks * 1024)[:, None] + np.arange(1024)
    mine = mine[mine < sums.size]
    sums[mine] = 7.0
    sums[mine[0] - 1] = sums[mine[-1024] - 1] = 7.0  # of the block before
    made.run((sections - 1) * (tiles + 1) + tiles - 1, kernel="prepare")
    assert (sums[mine] == 0.0).all() and sums[mine[0] - 1] == sums[mine[-1024] - 1] == 7.0
    assert (made["row_terms"][-1, -1, 0] == -np.inf).all()


def test_a_long_prompts_logits_are_shared_out() -> None:
    """Three tokens of a request of three million keys: the blocks of a token for each of them are more than 2^31."""
    keys, tokens, ctas = 3_200_000, 3, 4096
    config = LogitsConfig(8, ragged=True, tokens=4, q_groups=1, num_ctas=ctas)
    call, of_page = logits(config, tokens, keys, requests=1)
    call["cu_seqlens_q"][:] = 0, tokens
    each, more = divmod(keys // 64, ctas)
    for cta in (0, 1234, ctas - 1):
        call.run(cta)
        begin = (cta * each + min(cta, more)) * 64
        got = call["logits"][:, begin : begin + 10 * 64].reshape(tokens, 10, 64)
        visible = keys - tokens + 1 + np.arange(tokens)[:, None] > np.arange(begin, begin + 640)
        want = np.where(visible.reshape(got.shape), of_page[:, None], got)
        assert np.allclose(got, want, rtol=1e-5, atol=1e-4)


def test_logits_behind_two_gigabytes_of_a_row() -> None:
    keys, ctas = 540_000_000, 1 << 20
    call, of_page = logits(LogitsConfig(8, num_ctas=ctas), 1, keys, requests=1)
    call.run(ctas - 1)
    assert np.allclose(call["logits"][0, -256:].reshape(4, 64), of_page, rtol=1e-5, atol=1e-4)


def logits(config: LogitsConfig, tokens: int, keys: int, requests: int) -> tuple[Call, np.ndarray]:
    """A call of one page, which lies everywhere in the block table, and the logits [tokens, 64] of its keys."""
    generator = np.random.default_rng(7)
    heads, shapes = config.num_heads, {"seq_lens": (requests,), "k_cache": (1, 64, 132)}
    shapes |= {"q": (tokens, heads, 128), "weights": (tokens, heads), "block_tables": (requests, keys // 64)}
    shapes |= {"logits": (tokens, keys)} | ({"cu_seqlens_q": (requests + 1,)} if config.ragged else {})
    call = Call(INDEXER_LOGITS, config, shapes)
    q = generator.normal(size=(tokens, heads, 128)).astype(ml_dtypes.float8_e4m3fn)
    k = generator.normal(size=(64, 128)).astype(ml_dtypes.float8_e4m3fn)
    weights, scales = (generator.uniform(0.5, 2, size).astype(np.float32) for size in ((tokens, heads), 64))
    call["q"][:], call["weights"][:], call["seq_lens"][:] = q.view(np.uint8).reshape(-1), weights, keys
    call["k_cache"].reshape(-1)[:] = np.r_[k.view(np.uint8).reshape(-1), scales.view(np.uint8)]
    scores = np.maximum(np.einsum("thd,kd->thk", q.astype(np.float32), k.astype(np.float32)), 0.0)
    return call, np.einsum("thk,th,k->tk", scores, weights, scales)


def test_the_last_of_many_rows_is_selected() -> None:
    """A million rows of 2,048 indices."""
    rows, k = (1 << 20) + 3, 2048
    call = Call(SELECT_TOPK, TopkConfig(k), {"logits": (rows, 64), "seq_lens": (rows,), "indices": (rows, k)})
    call["seq_lens"][-1] = 50
    call.run(rows - 1)
    assert (call["indices"][-1] == np.where(np.arange(k) < 50, np.arange(k), -1)).all()


@pytest.mark.parametrize("offset", [0, 19_999_998])
def test_indexer_keys_of_a_long_page(offset: int) -> None:
    """A page of twenty million keys: its second one begins behind 2^31 bytes, and so do the scales of each."""
    config, size = IndexerWriteConfig("bfloat16"), 20_000_000
    keys = np.random.default_rng(3).normal(size=(2, 128)).astype(ml_dtypes.bfloat16).view(np.uint16)
    written = []
    for page_size, slots in ((2, (0, 1)), (size, (offset, size + offset + 1))):
        pages = 1 if page_size == 2 else 2
        call = Call(WRITE_INDEXER_CACHE, config, {
            "k_cache": (pages, page_size, 132), "k": (2, 128), "slot_mapping": (2,)
        })  # fmt: skip
        call["k"][:], call["slot_mapping"][:] = keys, slots
        call.run(0)
        rows = [divmod(slot, page_size) for slot in slots]
        cache = call["k_cache"].reshape(pages, -1)
        written.append(np.concatenate([
            cache[page, first : first + count]
            for page, row in rows
            for first, count in ((128 * row, 128), (128 * page_size + 4 * row, 4))
        ]))  # fmt: skip
    assert written[0].any() and (written[0] == written[1]).all()


def test_a_compressed_key_of_a_long_page() -> None:
    """The last entry of a page of twenty million keys is the first one of a small page, if all have one angle."""
    config = CompressWriteConfig(4, 1, 128, "indexer", "float32", 64, 1e-6)
    generator, written = np.random.default_rng(4), []
    rows, angles = generator.normal(size=(4, 256)), generator.normal(size=(1, 64))
    for page_size in (1, 20_000_000):
        call = Call(COMPRESS_WRITE_KV_CACHE, config, {
            "cache": (1, page_size, 132), "state": (1, 8, 256), "state_positions": (1, 8), "kv_score": (4, 256),
            "ape": (4, 128), "state_slots": (1,), "seq_lens": (1,), "cu_seqlens_q": (2,), "norm_weight": (128,),
            "cos_sin": (1, 64), "block_tables": (1, 1), "kv_scale": (1,),
        })  # fmt: skip
        call["kv_score"][:], call["cos_sin"][:], call["norm_weight"][:] = rows, angles, 1.0
        call["seq_lens"][:], call["cu_seqlens_q"][:] = 4 * page_size, (0, 4)
        call.run(0)
        cache = call["cache"].reshape(-1)
        written.append(np.r_[cache[128 * (page_size - 1) :][:128], cache[-4:]])
    assert written[0].any() and (written[0] == written[1]).all()


def test_a_table_that_is_the_beginning_of_a_wide_one() -> None:
    """A row of a table of 2^26 pages of 64 keys, of which a request has two."""
    config, results = DecodeConfig("bfloat16", 16, 1), []
    numbers = np.random.default_rng(5).normal(size=16 * 576 + 3 * 64 * 576).astype(ml_dtypes.bfloat16).view(np.uint16)
    for width in (2, 1 << 26):
        shapes = {name: shape for name, (shape, _) in workspace_shapes(config, 2, 1, width).items()}
        call = Call(MLA_DECODE, config, shapes | {
            "q": (16, 576), "kv_cache": (3, 64, 576), "block_tables": (1, width), "seq_lens": (1,),
            "cu_seqlens_q": (1,), "scales": (2,), "out": (16, 512), "lse": (16,),
        })  # fmt: skip
        call["q"].reshape(-1)[:], call["kv_cache"].reshape(-1)[:] = np.split(numbers, [16 * 576])
        call["block_tables"][0, :2], call["seq_lens"][:], call["scales"][:] = (2, 1), 100, (0.04, 1.0)
        call.run(0, 1, kernel="attend")
        call.run(0, 1, kernel="merge_pieces")
        results.append((call["out"].copy(), call["lse"].copy()))
    assert results[0][0].any()
    assert all((a == b).all() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_pages": 1 << 25}, "block_tables hold 2147483648 keys a request (M * Z); the sm_90 decode kernel takes"),
        ({"batch": 1 << 13, "max_pages": 1 << 17}, "8192 requests of 8388608 keys (M * Z) are up to 2147524608 blocks"),
        ({"batch": 1 << 13, "max_pages": 1 << 14, "num_heads": 128, "max_q_len": 8}, "are up to 2147"),
        ({"batch": 1 << 13, "max_pages": 1 << 17, "batch_invariant": True}, None),  # several launches
        ({"batch": 300, "total_q_len": 8000, "max_q_len": 8000, "ragged": True, "num_heads": 128}, None),
        ({"batch": 1 << 14, "max_pages": 1 << 11}, None),
    ],
)
def test_decode_refuses_what_its_schedule_cannot_count(changes: dict[str, Any], said: str | None) -> None:
    sizes = {"batch": 1, "max_q_len": 1, "num_heads": 16, "max_pages": 1 << 12, "ragged": False} | changes
    given = {"total_q_len": sizes["batch"] * sizes["max_q_len"], "batch_invariant": False} | sizes
    cache = {"latent_dim": 512, "rope_dim": 64, "num_pages": 9, "page_size": 64}
    spec = DecodeSpec(**given, **cache, q_dtype="bfloat16", kv_dtype="bfloat16", causal=True)
    reasons = decode_reasons(spec)
    assert (reasons == []) if said is None else said in reasons[0] and len(reasons) == 1


@pytest.mark.parametrize(
    ("tokens", "selected", "said"),
    [
        (1, (1 << 31) - 64, "indices have 2147483584 columns (K)"),
        (1 << 18, 1 << 18, "262144 tokens of 262144 columns (K) are up to 2150"),
        (1 << 17, 2048, None),
    ],
)
def test_sparse_attention_refuses_what_its_schedule_cannot_count(tokens: int, selected: int, said: str | None) -> None:
    spec = dataclasses.replace(sparse_mla_spec({"num_heads": "128", "layout": "v32"}), num_tokens=tokens)
    reasons = sparse_reasons(dataclasses.replace(spec, num_selected=selected))
    assert (reasons == []) if said is None else said in reasons[0] and len(reasons) == 1


@pytest.mark.parametrize("requests", [0, 2])
def test_batch_invariant_calls_without_keys_have_no_reason_against_them(requests: int) -> None:
    """Their partial results have no slots."""
    decode = decode_spec({"num_heads": "16", "batch_invariant": "true"})
    assert decode_reasons(dataclasses.replace(decode, batch=requests, max_pages=0)) == []
    sparse = sparse_mla_spec({"num_heads": "16", "batch_invariant": "true"})
    assert sparse_reasons(dataclasses.replace(sparse, num_tokens=requests, num_selected=0)) == []


def test_logits_refuse_keys_that_32_bits_do_not_count() -> None:
    spec = indexer_logits_spec({"index_n_heads": "64"})
    assert logits_reasons(dataclasses.replace(spec, max_pages=1 << 24)) == []
    (reason,) = logits_reasons(dataclasses.replace(spec, max_pages=1 << 25))
    assert "block_tables hold 2147483648 keys a request (M * Z)" in reason


def test_compression_refuses_rings_that_32_bits_do_not_count() -> None:
    spec = compress_write_spec({"channels": "1024", "ratio": "128", "overlap": "false"})
    for tokens, ring, said in ((1 << 21, 1 << 30, False), (1 << 30, 1 << 21, False), (1 << 22, 1 << 22, True)):
        pooled = dataclasses.replace(spec.compress, num_tokens=tokens, ring=ring)
        reasons = compress_write_reasons(dataclasses.replace(spec, compress=pooled))
        assert [reason[:48] for reason in reasons] == ["a request may keep 4194304 new tokens in its rin"] * said


def test_an_axis_of_2_to_the_31_is_refused() -> None:
    operand = Operand("lse", "float32", (None,))
    operand.check_sizes((2**31 - 1,))
    with pytest.raises(ValueError, match=re.escape("lse: got [2147483648]; legal: axes of up to 2147483647")):
        operand.check_sizes((2**31,))


def test_rows_of_the_plan_are_found_in_64_bits() -> None:
    """A call may have 2^28 requests, most of them empty, and so as many rows of eight words. The gradient's sums of dq
    would be 1.6 terabytes."""
    operands = MLA_PREFILL.operands(PrefillConfig("bfloat16"))
    assert [operand.wide for operand in operands if operand.name == "plan"] == [True]
