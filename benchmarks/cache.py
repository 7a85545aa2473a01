"""Time the cache kernels and the merge kernel against the copy of as many bytes, on one GPU in one run.

    python3 benchmarks/cache.py --out FILE.json [--tokens 4096,16384] [--ops write_kv_cache] [--seconds 60]

For each operation, dtype and number of tokens: the compiled object that jax launches, launched on torch's stream, and
copies that move the same number of bytes, half of them read and half written: the driver's own (memcpy_us) and a kernel
of torch's (kernel_copy_us; `copy_us` is the faster of the two). All are CUDA-graph replays with the L2 cache flushed
before each, interleaved, medians. Slots and pages are a random permutation of a cache of twice as many tokens. `bytes`
counts every value read or written once; rows go to FILE.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from absl import app, flags
from floors import LATENT, ROPE
from harness import ARCH, Record, time_all, within_budget
from harness import launch as launch_object

TOKENS = flags.DEFINE_list("tokens", ["1", "128", "4096", "16384", "65536"], "numbers of tokens")
OPS = flags.DEFINE_list("ops", None, "operations; all by default")
HEADS = flags.DEFINE_integer("query_heads", 16, "query heads of rope_write_kv_cache and merge_attention_states")

PAGE, WIDTH, V_WIDTH = 64, LATENT + ROPE, 128
FP8 = "float8_e4m3fn"
DTYPES = {
    "write_kv_cache": (("bfloat16", "bfloat16"), ("bfloat16", FP8)),
    "rope_write_kv_cache": (("bfloat16", "bfloat16"), (FP8, FP8)),
    "gather_kv_cache": (("bfloat16", "bfloat16"), (FP8, "bfloat16")),
    "merge_attention_states": (("bfloat16", "bfloat16"), ("float32", "float32")),
    "write_packed_kv_cache": (("bfloat16", "uint8"),),
    "write_indexer_cache": (("bfloat16", "uint8"), ("float32", "uint8")),
    "indexer_quantize": (("bfloat16", FP8),),
}
"""In and cache; query and cache; cache and out; parts and out; in and cache twice; q and q8."""
INDEXER_HEADS, INDEXER_WIDTH = 64, 128


def write_call(tokens: int, dtypes: tuple[str, str], **options: Any) -> tuple[Callable[[], Any], int]:
    """A launch of write_kv_cache, and the bytes that it moves."""
    from tsmla_kernels.catalog import WRITE_KV_CACHE

    cache = empty_cache(tokens, dtypes[1])
    arrays = [cache, random(tokens, LATENT), random(tokens, ROPE), slots(tokens), scale(), cache]
    return launch(WRITE_KV_CACHE, WRITE_KV_CACHE.config(*dtypes, **options), arrays), moved(
        arrays[1:5], tokens, dtypes[1]
    )


def rope_write_call(tokens: int, dtypes: tuple[str, str], **options: Any) -> tuple[Callable[[], Any], int]:
    """A launch of rope_write_kv_cache, and the bytes that it moves."""
    import torch

    from tsmla_kernels.catalog import ROPE_WRITE_KV_CACHE

    rows = tokens * HEADS.value
    cache = empty_cache(tokens, dtypes[1])
    q = torch.empty(rows, WIDTH, dtype=getattr(torch, dtypes[0]), device="cuda")
    inputs = [random(rows, LATENT), random(rows, ROPE), random(tokens, LATENT), random(tokens, ROPE)]
    arrays = [cache, *inputs, slots(tokens), *angles(tokens), scale(), scale(), q, cache]
    config = ROPE_WRITE_KV_CACHE.config("bfloat16", *dtypes, **options)
    return launch(ROPE_WRITE_KV_CACHE, config, arrays), moved(arrays[1:11], tokens, dtypes[1])


def gather_call(tokens: int, dtypes: tuple[str, str], **options: Any) -> tuple[Callable[[], Any], int]:
    """A launch of gather_kv_cache from up to 32 requests of about equal length, and the bytes that it moves."""
    import torch

    from tsmla_kernels.catalog import GATHER_KV_CACHE

    cache = empty_cache(tokens, dtypes[0])
    requests = min(tokens, 32)
    lens = torch.full((requests,), tokens // requests, dtype=torch.int32)
    lens[-1] += tokens - int(lens.sum())
    width = -(-int(lens.max()) // PAGE)
    tables = torch.randint(0, cache.shape[0], (requests, width), dtype=torch.int32)
    out = torch.empty(tokens, WIDTH, dtype=getattr(torch, dtypes[1]), device="cuda")
    arrays = [cache, tables.cuda(), torch.zeros_like(lens).cuda(), lens.cuda(), scale(), out]
    call = launch(GATHER_KV_CACHE, GATHER_KV_CACHE.config(*dtypes, **options), arrays)
    return call, moved(arrays[1:], tokens, dtypes[0])


def merge_call(tokens: int, dtypes: tuple[str, str], **options: Any) -> tuple[Callable[[], Any], int]:
    """A launch of merge_attention_states on two parts of prefill's width, and the bytes that it moves."""
    import torch

    from tsmla_kernels.catalog import MERGE_ATTENTION_STATES

    rows = tokens * HEADS.value
    outs = [torch.randn(rows, V_WIDTH, device="cuda").to(getattr(torch, dtypes[0])) for _ in range(3)]
    lses = [torch.randn(rows, device="cuda") for _ in range(3)]
    arrays = [*outs[:2], *lses[:2], outs[2], lses[2]]
    config = MERGE_ATTENTION_STATES.config(dtypes[0], V_WIDTH, **options)
    return launch(MERGE_ATTENTION_STATES, config, arrays), whole(arrays)


def packed_write_call(tokens: int, dtypes: tuple[str, str], **options: Any) -> tuple[Callable[[], Any], int]:
    """A launch of write_packed_kv_cache with a rotation, and the bytes that it moves."""
    from tsmla_kernels.catalog import WRITE_PACKED_KV_CACHE

    cache = empty_cache(tokens, dtypes[1], 656)
    inputs = [random(tokens, LATENT), random(tokens, ROPE), slots(tokens), *angles(tokens)]
    call = launch(WRITE_PACKED_KV_CACHE, WRITE_PACKED_KV_CACHE.config(dtypes[0], True), [cache, *inputs, cache])
    return call, whole(inputs) + tokens * 656


def indexer_write_call(tokens: int, dtypes: tuple[str, str], **options: Any) -> tuple[Callable[[], Any], int]:
    """A launch of write_indexer_cache with a rotation, and the bytes that it moves."""
    import torch

    from tsmla_kernels.catalog import WRITE_INDEXER_CACHE

    cache = empty_cache(tokens, dtypes[1], 132)
    inputs = [random(tokens, INDEXER_WIDTH).to(getattr(torch, dtypes[0])), slots(tokens), *angles(tokens)]
    call = launch(WRITE_INDEXER_CACHE, WRITE_INDEXER_CACHE.config(dtypes[0], ROPE), [cache, *inputs, cache])
    return call, whole(inputs) + tokens * 132


def quantize_call(tokens: int, dtypes: tuple[str, str], **options: Any) -> tuple[Callable[[], Any], int]:
    """A launch of indexer_quantize with a rotation, and the bytes that it moves."""
    import torch

    from tsmla_kernels.catalog import INDEXER_QUANTIZE
    from tsmla_kernels.contract.packed import IndexerQuantizeSpec, Rotation
    from tsmla_kernels.sparse_cache.config import indexer_quantize_config

    rows = tokens * INDEXER_HEADS
    q8 = torch.empty(rows, INDEXER_WIDTH, device="cuda").to(torch.float8_e4m3fn)
    weights = random(rows, 1).reshape(rows)
    arrays = [random(rows, INDEXER_WIDTH), weights, *angles(tokens), q8, torch.empty(rows, device="cuda")]
    rotation = Rotation(ROPE, 0, "halves")
    spec = IndexerQuantizeSpec(tokens, INDEXER_HEADS, INDEXER_WIDTH, dtypes[0], dtypes[0], rotation)
    return launch(INDEXER_QUANTIZE, indexer_quantize_config(spec), arrays), whole(arrays)


CALLS = {
    "write_kv_cache": write_call,
    "rope_write_kv_cache": rope_write_call,
    "gather_kv_cache": gather_call,
    "merge_attention_states": merge_call,
    "write_packed_kv_cache": packed_write_call,
    "write_indexer_cache": indexer_write_call,
    "indexer_quantize": quantize_call,
}


def copy_calls(size: int) -> dict[str, Callable[[], Any]]:
    """Copies that read and write `size` bytes in all."""
    import torch

    source = torch.zeros(size // 8, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return {
        "memcpy_us": lambda: target.copy_(source),
        "kernel_copy_us": lambda: torch.bitwise_not(source, out=target),
    }


def empty_cache(tokens: int, dtype: str, width: int = WIDTH) -> Any:
    import torch

    pages = -(-2 * tokens // PAGE)
    return torch.zeros(pages, PAGE, width, dtype=torch.uint8, device="cuda").to(getattr(torch, dtype))


def random(rows: int, columns: int) -> Any:
    import torch

    return torch.randn(rows, columns, device="cuda").to(torch.bfloat16)


def slots(tokens: int) -> Any:
    import torch

    return torch.randperm(2 * tokens, device="cuda")[:tokens].to(torch.int32)


def angles(tokens: int) -> list[Any]:
    """cos and sin of a token each."""
    import torch

    return [torch.randn(tokens, ROPE // 2, device="cuda") for _ in range(2)]


def whole(arrays: list[Any]) -> int:
    """Bytes of arrays that are read or written whole."""
    return sum(array.numel() * array.element_size() for array in arrays)


def scale() -> Any:
    import torch

    return torch.full((1,), 0.7, device="cuda")


def moved(arrays: list[Any], tokens: int, kv_dtype: str) -> int:
    """Bytes of arrays that are read or written whole, and of the cache's rows of `tokens` tokens."""
    width = WIDTH * (1 if kv_dtype == FP8 else 2)
    return whole(arrays) + tokens * width


def launch(kernel: Any, config: Any, arrays: list[Any]) -> Callable[[], Any]:
    """The launch of a kernel compiled for `config` on torch tensors."""
    from tsmla_kernels.launch import Launcher

    return launch_object(Launcher(kernel, config, ARCH), arrays, arrays)


def main(argv: list[str]) -> int:
    del argv
    record = Record(page=PAGE)
    ops, tokens_of = OPS.value or CALLS, [int(tokens) for tokens in TOKENS.value]
    points = [(op, dtypes, tokens) for op in ops for dtypes in DTYPES[op] for tokens in tokens_of]
    for op, dtypes, tokens in within_budget(points):
        call, size = CALLS[op](tokens, dtypes)
        timed = time_all({"us": call, **copy_calls(size)}, 30)
        times = {name: round(us, 2) for name, us in timed.items()}
        us = times["us"]
        copy_us = times["copy_us"] = min(times["memcpy_us"], times["kernel_copy_us"])
        heads = {"query_heads": HEADS.value} if op in ("rope_write_kv_cache", "merge_attention_states") else {}
        record.add(op=op, dtypes=list(dtypes), tokens=tokens, **heads, bytes=size, **times)
        print(
            f"{op:20s} {dtypes[0]:13s} {dtypes[1]:13s} {tokens:6d} tsmla {us:7.2f} memcpy {times['memcpy_us']:7.2f}"
            f" kernel {times['kernel_copy_us']:7.2f}  x{us / copy_us:.2f}  {size / us / 1e6:.2f} TB/s",
            flush=True,
        )
        del call
    return 0


if __name__ == "__main__":
    app.run(main)
