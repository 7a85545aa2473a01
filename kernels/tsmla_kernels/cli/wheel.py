"""`tsmla wheel`: a wheel of compiled objects, so that a machine on which it is installed compiles nothing for them.

The wheel has one package, tsmla_objects, which holds the cache's entries as they are. `object_cache` looks there after
the user's own folder, by the same identity: an object of another version, DSL, host or source is not loaded.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import itertools
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tsmla_kernels import __version__, object_cache
from tsmla_kernels.catalog import CHAINS, KERNELS
from tsmla_kernels.cli.objects import Wanted, compile_all, configs, listed, missing_of
from tsmla_kernels.cli.packages import DISTRIBUTION
from tsmla_kernels.kernel import Chain, Kernel

WHEEL = "tsmla-objects"
"""The distribution in the wheel."""
ARCH = "sm_90a"
PARALLEL, NEW_TOKENS, STEPS = (1, 2, 4, 8), (1, 2, 4), (1, 16, 64, 256)
"""Devices that share the heads; new tokens of a request in a decode step; requests of a step, for the kernels that
depend on them."""
DTYPES = ("dtype=bfloat16", "dtype=bfloat16,kv_dtype=float8_e4m3fn", "dtype=float8_e4m3fn")
MODELS = ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "kimi-k2")
V4 = "layout=v4,head_dim=512,lengths=true,sinks=true"
V4_MODELS = ((64, 512), (128, 1024))
"""Heads of V4's models, and how many entries their indexer chooses."""
V4_ENTRIES = (4096, 32768, 262144)
"""Entries that a row of the indexer's block tables has at most, one for each 4 tokens of a text."""
V4_COMPRESSED = (
    "dtype=float32,ratio=4", "dtype=float32,ratio=128,overlap=false,page_size=2",
    "dtype=float32,ratio=4,channels=128,cache=indexer",
)  # fmt: skip
LIMIT = "limit=10.0"
"""V4's."""


class Call(NamedTuple):
    """A call of a decode step: a kernel or chain, and its options as `tsmla compile --config` takes them."""

    kernel: str
    options: str


def calls() -> Iterator[Call]:
    """The operations of decode steps of DeepSeek-V2, V2-Lite, V3, V3.2, V4 and Kimi-K2, and most of the kernels of few
    tokens."""
    for dtype in DTYPES:
        for model, devices, new in itertools.product(MODELS, PARALLEL, NEW_TOKENS):
            for ragged in ("false", "true")[: 1 + (new > 1)]:
                given = f"{model},tensor_parallel={devices},max_q_len={new},ragged={ragged},{dtype}"
                yield Call("mla_decode", given)
        for kernel in ("write_kv_cache", "rope_write_kv_cache", "gather_kv_cache"):
            yield Call(kernel, f"num_heads=16,{dtype}")
    yield from _v32_calls()
    yield from _v4_calls()
    yield from _attention_of_one_token()
    yield from _few_token_calls()


def _v32_calls() -> Iterator[Call]:
    for requests, new in itertools.product(STEPS, NEW_TOKENS):
        step = f"deepseek-v3.2,num_tokens={requests * new},num_requests={requests}"
        yield Call("indexer_topk", step)
        for devices in PARALLEL:
            yield Call("sparse_mla", f"{step},tensor_parallel={devices}")
    for kernel in ("write_packed_kv_cache", "write_indexer_cache", "indexer_quantize"):
        yield Call(kernel, "deepseek-v3.2")


def _v4_calls() -> Iterator[Call]:
    for requests, (heads, k) in itertools.product(STEPS, V4_MODELS):
        step = f"num_tokens={requests},num_requests={requests}"
        for layer, devices in itertools.product(_v4_layers(k), PARALLEL):
            yield Call("sparse_mla", f"{V4},num_heads={heads},{layer},{step},tensor_parallel={devices}")
        for entries in V4_ENTRIES:
            yield Call("indexer_topk", f"{step},k={k},num_heads=64,ragged=false,num_columns={entries}")
    yield Call("indexer_quantize", "rope_offset=64,index_rope_layout=interleaved")
    for compressed in V4_COMPRESSED:
        yield Call("compress_write_kv_cache", compressed)


def _v4_layers(k: int) -> Iterator[str]:
    """The options of sparse_mla in each kind of layer: of the window alone, of the `k` entries that an indexer chooses,
    and of all entries, which are few columns in texts of up to 16,384 tokens."""
    yield "num_selected=128"
    yield f"num_selected={128 + k},window=128,compressed_page_size=64,compressed_page_span=64"
    for columns in (256, 1152):
        yield f"num_selected={columns},window=128,compressed_page_size=2,compressed_page_span=2"


def _attention_of_one_token() -> Iterator[Call]:
    """mla_decode without its second kernel, and the kernel that merges its pieces."""
    for dtype, model, devices in itertools.product(DTYPES, MODELS, PARALLEL):
        given = f"{model},tensor_parallel={devices},{dtype},merged=false"
        yield Call("mla_decode", given)
        for _, config in configs(given, [KERNELS["mla_decode"]]):
            shape = config.shape
            pieces = f"partial_dtype={shape.partial_dtype},lane_order={str(shape.partial_is_lane_order).lower()}"
            yield Call("few_token_values", f"num_heads={shape.num_heads},{pieces}")


def _few_token_calls() -> Iterator[Call]:
    for tokens, dtype in itertools.product((1, 16), ("bfloat16", "float8_e4m3fn")):
        given = f"num_tokens={tokens},dtype={dtype}"
        for more in ("", ",gated=true", ",normed=false,residual=true"):
            yield Call("few_token_matmul", given + more)
        for cache in ("bfloat16", "float8_e4m3fn", "uint8"):
            yield Call("few_token_queries", f"{given},kv_dtype={cache}")
        for choices, limit in ((8, ""), (9, ""), (7, f",{LIMIT}")):
            yield Call("few_token_experts_up", f"{given},choices={choices}{limit}")
            yield Call("few_token_experts_down", f"{given},choices={choices}")
    yield Call("few_token_window", "page_size=64")
    for written in ("true", "false"):
        yield Call("few_token_write_streams", f"written={written}")
    yield Call("few_token_read_streams", "in_features=4096")
    for more in ("", ",tail=true,pooled=2"):
        yield Call("few_token_inputs", f"in_features=4096{more}")
    yield Call("few_token_outputs", "num_tokens=1")
    for dtype in ("bfloat16", "float32"):
        yield Call("few_token_index_key", f"dtype={dtype}")
    for tokens in (1, 2, 4, 8, 16):
        yield Call("few_token_router", f"num_tokens={tokens}")


def wanted_by(some: Iterable[Call]) -> list[Wanted]:
    """The objects of these calls, each once."""
    named: dict[str, Kernel | Chain] = {**KERNELS, **CHAINS}
    found: dict[Wanted, None] = {}
    for kernel, options in some:
        for made, config in configs(options, [named[kernel]]):
            found[Wanted(made, config, ARCH)] = None
    return list(found)


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tsmla wheel`."""
    parser.add_argument(
        "--out", type=Path, default=Path("dist"), metavar="DIR", help="the wheel's folder (%(default)s)"
    )
    parser.add_argument(
        "--list",
        type=Path,
        metavar="FILE",
        help="what the wheel holds, as `tsmla cache list --json` prints it (default: the decode steps of DeepSeek-V2,"
        f" V2-Lite, V3, V3.2, V4 and Kimi-K2 on {ARCH}, the heads on 1, 2, 4 or 8 devices)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes to compile in (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Compile what the cache lacks, and write the wheel. Returns 1 if a kernel doesn't compile or can't be stored.
    Raises ValueError for an illegal --jobs or list, ModuleNotFoundError if something must be compiled and there is no
    CuTe DSL, ValueError or OSError if a folder can't be written."""
    if args.jobs < 1:
        raise ValueError(f"--jobs: got {args.jobs}; legal: an int >= 1")
    if args.list is None:
        wanted = wanted_by(calls())
    else:
        illegal: list[str] = []
        wanted = list(dict.fromkeys(listed(args.list, illegal)))
        if illegal:
            raise ValueError(illegal[0])
    if compile_all(missing_of(wanted), args.jobs):
        return 1
    entries = [path for each in wanted if (path := object_cache.stored(*each)) is not None]
    args.out.mkdir(parents=True, exist_ok=True)
    wheel = write_wheel(args.out, entries)
    print(f"{len(entries)} objects, {wheel.stat().st_size / 1e6:.2f} MB: {wheel}")
    return 0


# ---- the wheel


def write_wheel(folder: Path, entries: Sequence[Path]) -> Path:
    """Write the wheel of these entries of the cache into the folder. The same entries make the same bytes."""
    name, platform = WHEEL.replace("-", "_"), sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tag, info = f"py3-none-{platform}", f"{name}-{__version__}.dist-info"
    about = f'"""Compiled kernels of {DISTRIBUTION} {__version__}. The cache of compiled kernels reads them."""\n'
    metadata = (
        f"Metadata-Version: 2.1\nName: {WHEEL}\nVersion: {__version__}\n"
        f"Summary: Compiled kernels of {DISTRIBUTION}\nLicense: Apache-2.0\n"
    )
    files = {f"{object_cache.PREBUILT}/__init__.py": about.encode()}
    files |= {f"{object_cache.PREBUILT}/{path.name}": path.read_bytes() for path in sorted(entries)}
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tsmla\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    lines = [f"{path},sha256={_digest(content)},{len(content)}" for path, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    target = folder / f"{name}-{__version__}-{tag}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for path, content in files.items():
            member = zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0))
            member.external_attr, member.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(member, content)
    return target


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
