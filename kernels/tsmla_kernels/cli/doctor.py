"""`tsmla doctor`: what this machine has and can run, and what to install for the rest.

It starts jax if jax is installed, and torch only if jax isn't installed or uses no GPU. It reads packages' versions
from their metadata.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsmla_kernels import __version__
from tsmla_kernels.cli import packages, parsing
from tsmla_kernels.cli.packages import DSL, JAX, PACKAGES, TORCH, install_command

if TYPE_CHECKING:
    from tsmla_bridge.engines.versions import Found
    from tsmla_bridge.report import Torch
    from tsmla_jax.cli.devices import Devices
    from tsmla_jax.cli.usual_calls import UsualCall

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CUDA13_DRIVER = 580
_SM100 = "_sm100"


@dataclasses.dataclass(frozen=True)
class Report:
    """All that the doctor found. `jax` is None if jax isn't installed. `torch` is None if torch isn't installed, or if
    jax is and uses the machine's GPUs. `advice` starts with what matters most."""

    version: str
    python: str
    system: str
    repository: str | None
    packages: dict[str, str | None]
    driver: str | None
    jax: Devices | None
    operations: tuple[UsualCall, ...]
    torch: Torch | None
    architectures: dict[str, str]
    cache: parsing.CacheState
    engines: tuple[Found, ...]
    advice: tuple[str, ...]


def _driver() -> str | None:
    """The NVIDIA kernel driver's version, such as "580.65.06", or "unknown" if its file names none; None without a
    driver."""
    if not _DRIVER_FILE.exists():
        return None
    words = _DRIVER_FILE.read_text().split()
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "unknown")


def _architectures() -> dict[str, str]:
    """The kernels for each family of GPUs, in words."""
    from tsmla_kernels.catalog import CHAINS, KERNELS

    kernels = sorted([*CHAINS, *(name for name, kernel in KERNELS.items() if "sm_90a" in kernel.archs)])
    written = sorted(name for name, kernel in KERNELS.items() if "sm_100a" in kernel.archs)
    # A kernel for Blackwell alone has its operation's name and this ending.
    ours = [name for name in written if not name.endswith(_SM100)]
    packaged = [name.removesuffix(_SM100) for name in written if name.endswith(_SM100)]
    blackwell = (
        f"kernels for {', '.join(ours)}, and of other packages (extra blackwell) for {', '.join(packaged)}; none of"
        ' them has run on such a GPU, so one is taken only where implementation="cute" names it; otherwise jax runs'
        " xla, and torch its own operations, or raises an error for attention; SM107 has none for indexer_logits and"
        " sparse_mla"
    )
    others = "in jax every operation runs as xla; the products of experts and of fp8 matrices are in Pallas"
    older = "in jax every operation and product runs as xla"
    return {
        "Hopper (SM90)": f"kernels for {', '.join(kernels)}; in jax the other operations run as xla",
        "Blackwell (SM100, SM103, SM107)": blackwell,
        "Ampere, Ada and others (from SM80 on)": others,
        "older": older,
    }


def advise(
    installed: Mapping[str, str | None], driver: str | None, jax: Devices | None, torch: Torch | None
) -> tuple[str, ...]:
    """The steps to take, the most important first; empty if nothing is missing."""
    advice = []
    if broken := packages.why_broken():
        advice.append(broken)
    if jax is None and installed[TORCH] is None:
        advice.append(f"neither front end has its package: {install_command('jax')} or {install_command('cuda13')} for"
                      f" jax, {install_command('torch')} for PyTorch")  # fmt: skip
    if driver is None:
        needs = "the kernels need a Hopper or Blackwell GPU"
        advice.append(f"No NVIDIA driver here: {needs}; xla and reference run on this machine.")
    if jax is not None:
        advice += _advise_jax(installed, driver, jax)
    if torch is not None:
        advice += _advise_torch(driver, torch)
    wanted = {DSL: "cuda13" if jax is not None else "torch", "matplotlib": "bench"}
    wanted |= dict.fromkeys(("tokenspeed-mla", "flashinfer-python", "nvidia-cudnn-frontend"), "blackwell")
    if jax is not None:
        wanted |= {"flax": "flax", "safetensors": "hf", "tokenizers": "hf", TORCH: "torch"}
    for package in PACKAGES:
        if package.distribution in wanted and installed[package.distribution] is None:
            extra = wanted[package.distribution]
            advice.append(f"{package.distribution} ({package.purpose}): {install_command(extra)}")
    return tuple(advice)


def _advise_jax(installed: Mapping[str, str | None], driver: str | None, jax: Devices) -> list[str]:
    """The steps to take if jax uses no GPU."""
    advice = [f"jax starts no backend: {jax.failure}"] if jax.failure else []
    if driver is not None and not jax.on_gpu:
        major = driver.partition(".")[0]
        extra = "cuda12" if major.isdigit() and int(major) < _CUDA13_DRIVER else "cuda13"
        if installed[f"jax-{extra}-plugin"] is None:
            advice.append(f"There is an NVIDIA driver ({driver}), but jax can't use it: {install_command(extra)}")
        else:
            advice.append(f"There is an NVIDIA driver ({driver}) and jax-{extra}-plugin, but jax uses no GPU: "
                          "see JAX_PLATFORMS and CUDA_VISIBLE_DEVICES")  # fmt: skip
    return advice


def _advise_torch(driver: str | None, torch: Torch) -> list[str]:
    """The steps to take if torch uses no GPU."""
    if torch.failure:
        return [f"torch can't be imported: {torch.failure}"]
    if driver is None or torch.gpus:
        return []
    return [f"There is an NVIDIA driver ({driver}), but torch uses no GPU: it may be a build for CPUs, or for a newer"
            " CUDA than the driver's; see CUDA_VISIBLE_DEVICES, and pytorch.org for the build that fits"]  # fmt: skip


def examine() -> Report:
    """Look at this machine. Starts the backend of jax, and that of torch if jax isn't installed or uses no GPU;
    allocates nothing on a GPU."""
    from tsmla_bridge.engines import versions

    installed = {package.distribution: packages.version_of(package.distribution) for package in PACKAGES}
    driver = _driver()
    jax: Devices | None = None
    torch: Torch | None = None
    operations: tuple[UsualCall, ...] = ()
    if importlib.util.find_spec(JAX) is not None:
        from tsmla_jax.cli import devices, usual_calls

        jax = devices.examine()
        operations = usual_calls.usual_calls() if jax.names else ()
    if installed[TORCH] is not None and (jax is None or not jax.on_gpu):
        from tsmla_bridge import report

        torch = report.examine()
    return Report(
        version=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        repository=packages.repository(),
        packages=installed,
        driver=driver,
        jax=jax,
        operations=operations,
        torch=torch,
        architectures=_architectures(),
        cache=parsing.examine_cache(),
        engines=versions.examine(),
        advice=advise(installed, driver, jax, torch),
    )


def render(report: Report) -> str:
    """The report as text for a terminal."""
    lines = [f"tsmla {report.version}, Python {report.python}, {report.system}"]
    lines += ["", f"Devices (NVIDIA driver: {report.driver or 'none'})"]
    if report.jax is not None:
        lines += [f"  jax, backend {report.jax.backend or 'none'}", *(f"    {name}" for name in report.jax.names)]
    if report.torch is not None:
        gpus = [f"    {gpu.name}  {gpu.arch}" for gpu in report.torch.gpus] or ["    no GPU that torch can use"]
        lines += ["  torch", *gpus]
    lines += ["", "Packages"]
    width = max(map(len, report.packages))
    for package in PACKAGES:
        version = report.packages[package.distribution] or "not installed"
        lines.append(f"  {package.distribution:{width}}  {version:14}  {package.purpose}")
    lines += _render_operations(report)
    lines += ["", "Kernels by architecture"]
    lines += [f"  {name}: {there}" for name, there in report.architectures.items()]
    from tsmla_bridge.engines import versions

    lines += ["", *parsing.render_cache(report.cache), "", *versions.render(report.engines)]
    if report.advice:
        lines += ["", "What is missing, and how to get it", *(f"  {line}" for line in report.advice)]
        if report.repository is not None:
            # The commands above add to an environment that has this distribution, which no index has.
            lines.append(f'  elsewhere: pip install "{packages.DISTRIBUTION}[...] @ git+{report.repository}"')
    return "\n".join(lines)


def _render_operations(report: Report) -> list[str]:
    """What runs the operations of the front ends that are installed."""
    lines = []
    if report.operations:
        from tsmla_jax.cli.usual_calls import lines_of

        lines += ["", "Operations, and the implementation that runs the usual calls of DeepSeek's models"]
        said: set[str] = set()
        for operation in report.operations:
            # Usually one reason blocks every kernel: print it once.
            call, *reasons = lines_of(operation)
            lines += [f"  {call}", *(f"  {reason}" for reason in reasons if reason not in said)]
            said.update(reasons)
    if report.torch is not None:
        from tsmla_bridge import report as torch_report

        lines += ["", "Operations of tsmla_bridge", *torch_report.lines_of(report.torch)]
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tsmla doctor`."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Returns 0 even if something is missing."""
    report = examine()
    print(json.dumps(_plain(report), indent=2) if arguments.json else render(report))
    return 0


def _plain(report: Report) -> dict[str, Any]:
    """The report as JSON can hold it."""
    found = dataclasses.asdict(report)
    found["jax"] = None if report.jax is None else report.jax._asdict()
    found["torch"] = None
    if report.torch is not None:
        found["torch"] = report.torch._asdict() | {"gpus": [gpu._asdict() for gpu in report.torch.gpus]}
    return found
