"""The packages that something here uses, and the commands that install them.

Packages are looked up by their metadata, so that a broken one can't break a report.
"""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple

DISTRIBUTION = "tsmla-jax"
FORMER = "tsmla-torch"
"""The distribution for torch alone, up to 0.2: it holds files of the same names as this one."""


class Package(NamedTuple):
    """A distribution that something here uses: the module it brings, its purpose, and our extra that installs it."""

    distribution: str
    module: str
    purpose: str
    extra: str


JAX = "jax"
TORCH = "torch"
DSL = "nvidia-cutlass-dsl"
PACKAGES = (
    Package(JAX, "jax", "the front end for jax, tsmla_jax", "jax"),
    Package("jaxlib", "jaxlib", "the front end for jax, tsmla_jax", "jax"),
    Package("jax-cuda13-plugin", "jax_cuda13_plugin", "NVIDIA GPUs in jax, driver 580 or newer", "cuda13"),
    Package("jax-cuda12-plugin", "jax_cuda12_plugin", "NVIDIA GPUs in jax, older drivers", "cuda12"),
    Package("flax", "flax", "tsmla_jax.nn.MLAttention", "flax"),
    Package("safetensors", "safetensors", "reading checkpoints", "hf"),
    Package("tokenizers", "tokenizers", "text prompts in tsmla generate", "hf"),
    Package(TORCH, "torch", "the front end for PyTorch, tsmla_bridge", "torch"),
    Package(DSL, "cutlass", 'compiling the kernels, implementation="cute"', "cuda13"),
    Package("tokenspeed-mla", "tokenspeed_mla", "Blackwell: mla_decode and mla_prefill", "blackwell"),
    Package("flashinfer-python", "flashinfer", "Blackwell: indexer_logits", "blackwell"),
    Package("nvidia-cudnn-frontend", "cudnn", "Blackwell: sparse_mla", "blackwell"),
    Package("matplotlib", "matplotlib", "make figures", "bench"),
)


def version_of(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def repository() -> str | None:
    """The repository's address, from the metadata of what is installed; None where nothing is, or the address is the
    placeholder of an unpublished tree."""
    try:
        urls = importlib.metadata.metadata(DISTRIBUTION).get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    address = next((url.partition(", ")[2] for url in urls if url.startswith("Repository, ")), None)
    return None if address is None or ".invalid/" in address else address


def install_command(extra: str) -> str:
    """The command that adds an extra to an environment which has this distribution."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def install_hint(module: str | None) -> str:
    """The end of a "No module named ..." message: the command that installs the module, or nothing if no extra does."""
    root = (module or "").partition(".")[0]
    extra = next((package.extra for package in PACKAGES if package.module == root), None)
    return f": {install_command(extra)}" if extra else ""


def why_broken() -> str | None:
    """The fault of the environment's distributions, and the commands that mend it; None if there is none."""
    former = version_of(FORMER)
    if former is None:
        return None
    return (
        f"{FORMER} {former} is installed beside {DISTRIBUTION}, which has its files now: uninstalling one breaks the"
        f" other. pip uninstall {FORMER}, then install {DISTRIBUTION} again with --force-reinstall --no-deps"
    )
