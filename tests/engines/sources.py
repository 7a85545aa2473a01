"""The engines' sources, unpacked from their wheels, for tests that run an engine's own code on a CPU.

`python tests/engines/sources.py [FOLDER]` fetches them: each version's wheel without its compiled files (0.6 GB in
all), and the packages that the engines import, torch and jax aside (1.5 GB). The tests find them in the folder that
TSMLA_ENGINES names, or in .engines at the root of the repository. sglang-jax's wheels are older than its DeepSeek
models: its commit is cloned there by the command that its skipped test prints.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM = ("0.26.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
SGLANG = ("0.5.17", "0.5.23")
SGLANG_JAX = "cddbf6f1cc33cbdd453bd8f36ff7051cf46ca176"  # 2026-08-21
SKYRL_TX = ("0.3.0",)
MODULES = {"vllm": "vllm", "sglang": "sglang", "skyrl-tx": "tx"}
"""The package that each wheel holds."""
COMMAND = "python tests/engines/sources.py"
# What `import vllm` and `import sglang` need, beside what this project's own tests do.
PACKAGES = (
    "packaging", "regex", "psutil", "pyzmq", "urllib3", "pydantic", "cbor2", "transformers>=5.16.1,<5.21", "aiohttp",
    "requests", "openai_harmony", "openai", "pillow", "pybase64", "cachetools", "msgspec", "cloudpickle", "uvloop",
    "py-cpuinfo", "prometheus_client", "fastapi", "partial_json_parser", "llguidance", "einops", "blake3",
    "setproctitle", "apache-tvm-ffi", "orjson", "ipython", "uvicorn", "python-multipart",
)  # fmt: skip
# Installed alone: these ask for torch, or for more than is imported. Those of SGLang would change what vLLM does, and
# accelerate what SGLang does.
ALONE = {
    "packages": ("xgrammar",),
    "packages-sglang": (
        "triton", "torchvision==0.28.0", "dill", "sentencepiece", "compressed-tensors", "loguru", "gguf"
    ),
    # SGLang 0.5.17 takes no other transformers, which takes no newer packages of these.
    "packages-sglang-0.5.17": (
        "transformers==5.12.1", "tokenizers==0.22.2", "huggingface_hub==1.33.0", "httpx", "httpcore"
    ),
    "packages-sglang-jax": ("pathwaysutils", "httpx", "httpcore"),
    "packages-skyrl-tx": ("cloudpathlib", "peft", "accelerate"),
}  # fmt: skip


def folder() -> Path:
    """Where the sources are looked for."""
    return Path(os.environ.get("TSMLA_ENGINES") or ROOT / ".engines")


def why_not(engine: str, version: str) -> str | None:
    """The reason that an engine's tests are skipped; None if its sources are here."""
    if (folder() / f"{engine}-{version}" / MODULES[engine]).is_dir() and (folder() / "packages").is_dir():
        return None
    return f"needs {engine} {version} unpacked under {folder()}: {COMMAND}"


def why_no_sglang_jax() -> str | None:
    """The same of sglang-jax's repository."""
    clone = folder() / "sglang-jax"
    if (clone / "python" / "sgl_jax").is_dir() and (folder() / "packages-sglang-jax").is_dir():
        return None
    return (
        f"needs sglang-jax at {SGLANG_JAX[:7]}: git clone https://github.com/sgl-project/sglang-jax {clone}"
        f" && git -C {clone} checkout {SGLANG_JAX} && {COMMAND}"
    )


def run_cases(engine: str, version: str, cases: str) -> None:
    """Run pytest on a file of cases in a process that imports this version of the engine."""
    name = f"{engine}-{version}"
    run_with(f"{engine} {version}", [name, f"packages-{name}", "packages", f"packages-{engine}"], cases)


def run_with(name: str, folders: Sequence[str], cases: str, *, timeout: int = 900) -> None:
    """Run pytest on a file of cases in a process that imports from these of folder()'s folders too."""
    paths = [ROOT, ROOT / "kernels", ROOT / "bridge", *(folder() / each for each in folders)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", cases]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{name}\n{done.stdout[-20000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout


def fetch(target: Path) -> None:
    """Download the wheels and unpack them under `target`."""
    pip = [sys.executable, "-m", "pip"]
    target.mkdir(parents=True, exist_ok=True)
    for engine, versions in (("vllm", VLLM), ("sglang", SGLANG), ("skyrl-tx", SKYRL_TX)):
        for version in versions:
            if (target / f"{engine}-{version}" / MODULES[engine]).is_dir():
                continue
            with tempfile.TemporaryDirectory() as wheels:
                subprocess.run(
                    [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", wheels,
                     f"{engine}=={version}"],
                    check=True,
                )  # fmt: skip
                (wheel,) = Path(wheels).iterdir()
                with zipfile.ZipFile(wheel) as archive:
                    wanted = [name for name in archive.namelist() if not name.endswith((".so", ".cubin", "vllm-rs"))]
                    archive.extractall(target / f"{engine}-{version}", wanted)
    install = [*pip, "install", "--quiet", "--upgrade", "--target"]
    subprocess.run([*install, str(target / "packages"), *PACKAGES], check=True)
    for name, packages in ALONE.items():
        subprocess.run([*install, str(target / name), "--no-deps", *packages], check=True)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else folder())
