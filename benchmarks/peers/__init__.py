"""Kernels of other projects, beside which ours are timed: where they come from, whether they are here, and how they are
loaded.

Libraries are taken from the folder that --peers names, else from installed packages. `python -m benchmarks.peers DIR`
downloads the wheels and puts their libraries into DIR, which needs no installation of vLLM or SGLang; the kernels are
built for torch 2.11 with CUDA 13 and run on Hopper.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import lzma
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from absl import flags

PEERS = flags.DEFINE_string("peers", None, "folder of the peers' libraries, as `python -m benchmarks.peers` makes it")


class Library(NamedTuple):
    """A peer's library: a file of torch operators or a package's folder, in a wheel; or an importable module, without a
    wheel.

    title: its name, and the version that was run or is needed, except of a library that comes with torch."""

    title: str
    wheel: str
    inside: str


LIBRARIES = {
    "flashmla": Library("FlashMLA of vLLM 0.26.0", "vllm==0.26.0", "vllm/_flashmla_C.abi3.so"),
    "flashmla_fp8": Library("FlashMLA of vLLM 0.26.0", "vllm==0.26.0", "vllm/_flashmla_extension_C.abi3.so"),
    "fa3": Library("FA3 of vLLM 0.26.0", "vllm==0.26.0", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"),
    "vllm_c": Library("vLLM 0.26.0", "vllm==0.26.0", "vllm/_C_stable_libtorch.abi3.so"),
    "deep_gemm": Library("DeepGEMM of vLLM 0.26.0", "vllm==0.26.0", "vllm/third_party/deep_gemm/"),
    "sgl": Library("sglang-kernel 0.4.6", "sglang-kernel==0.4.6", "sgl_kernel/sm90/common_ops.abi3.so"),
    "legacy": Library("sgl-flash-mla 1.0.0", "sgl-flash-mla==1.0.0", "flash_mla/_C_legacy.abi3.so"),
    "fa4": Library("flash-attn-4 4.0.0b36", "", "flash_attn.cute.interface"),
    "cudnn": Library("cuDNN through torch", "", "torch"),
    "cudnn_frontend": Library("cudnn-frontend 1.32.0", "", "cudnn"),
    "cudnn_jax": Library("cuDNN 9.10 or newer through jax", "", "jax"),
}
INSTALL = {"fa4": "pip install flash-attn-4==4.0.0b36", "cudnn": "pip install torch", "cudnn_jax": "pip install jax",
           "cudnn_frontend": "pip install nvidia-cudnn-frontend==1.32.0"}  # fmt: skip


def find(name: str) -> Path | None:
    """The library's file or folder; None if it is not here."""
    inside = LIBRARIES[name].inside
    if PEERS.value:
        folder = Path(PEERS.value)
        places = [folder / f"{name}{end}" for end in ((".so", ".so.xz") if inside.endswith(".so") else ("", ".zip"))]
    else:
        places = []
    package, _, rest = inside.partition("/")
    spec = importlib.util.find_spec(package)
    places += [Path(found) / rest for found in (spec.submodule_search_locations if spec else None) or ()]
    return next((place for place in places if place.exists()), None)


@functools.cache
def no_gpu() -> str | None:
    """Why no kernel, ours or a peer's kernel, can be timed here; None if kernels can be timed."""
    return None if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else "no Hopper GPU"


@functools.cache
def why_not(name: str) -> str | None:
    """Why a library can't be used here, all reasons; None if it can."""
    reasons = [reason] if (reason := no_gpu()) else []
    title, wheel, inside = LIBRARIES[name]
    if wheel and find(name) is None:
        reasons.append(f"no {inside} of {wheel} (python -m benchmarks.peers DIR {name}, then --peers DIR)")
    elif not wheel and not _is_installed(inside):
        reasons.append(f"no {title} ({INSTALL[name]})")
    return ", ".join(reasons) or None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@functools.cache
def load(name: str) -> None:
    """Load a library that is here: then its operators are in torch.ops, or its package can be imported.

    Raises:
      OSError: its file of operators does not load, for example because of another version of torch.
    """
    if not LIBRARIES[name].wheel:
        return
    path = find(name)
    assert path is not None
    if not LIBRARIES[name].inside.endswith(".so"):
        if path.suffix == ".zip":
            target = Path(tempfile.mkdtemp())
            zipfile.ZipFile(path).extractall(target)
            path = target / name
        sys.path.insert(0, str(path.parent))
        return
    if path.suffix == ".xz":
        target = Path(tempfile.mkdtemp()) / f"{name}.so"
        with lzma.open(path) as packed:
            target.write_bytes(packed.read())
        path = target
    torch.ops.load_library(str(path))


def versions() -> dict[str, str]:
    """The versions that versions.json in the folder of --peers has; none without the file."""
    path = Path(PEERS.value or ".") / "versions.json"
    return json.loads(path.read_text()) if PEERS.value and path.exists() else {}


def unpack(folder: Path, names: Iterable[str]) -> None:
    """Download the wheels of those of `names` that have one, and put their libraries into `folder`, with a
    versions.json.

    Raises:
      subprocess.CalledProcessError: pip can't get a wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {name: LIBRARIES[name] for name in names if LIBRARIES[name].wheel}
    for wheel in dict.fromkeys(library.wheel for library in wanted.values()):
        with tempfile.TemporaryDirectory() as place:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", place, wheel]
            subprocess.run([*pip, "--python-version", "3.12", "--platform", "manylinux_2_28_x86_64", "--platform",
                            "manylinux_2_31_x86_64", "--platform", "manylinux2014_x86_64", "--abi", "abi3", "--abi",
                            "cp312", "--abi", "none"], check=True)  # fmt: skip
            with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as archive:
                for name, library in wanted.items():
                    for member in archive.namelist() if library.wheel == wheel else ():
                        if member.startswith(library.inside) and not member.endswith("/"):
                            target = folder / (name + (member.removeprefix(library.inside) or ".so")
                                               if library.inside.endswith(".so")
                                               else f"{name}/{member.removeprefix(library.inside)}")  # fmt: skip
                            target.parent.mkdir(parents=True, exist_ok=True)
                            target.write_bytes(archive.read(member))
    texts = {name: library.title for name, library in wanted.items()}
    listed = folder / "versions.json"
    there = json.loads(listed.read_text()) if listed.exists() else {}
    listed.write_text(json.dumps(there | texts, indent=1))
