"""The report of torch for `tsmla doctor`: its GPUs, and what runs the operations on their tensors."""

from __future__ import annotations

from typing import NamedTuple

from tsmla_kernels.catalog import KERNELS
from tsmla_kernels.kernel import PROVEN
from tsmla_kernels.sm100 import config as sm100


class GPU(NamedTuple):
    """A GPU that torch can use; `arch` is "sm_90" and the like."""

    name: str
    arch: str


class Torch(NamedTuple):
    """The GPUs that torch can use, and the operations of tsmla_bridge.

    failure: why torch can't be imported; None if it can.
    """

    gpus: tuple[GPU, ...]
    failure: str | None
    operations: tuple[str, ...]


def examine() -> Torch:
    """Ask torch for its GPUs. Starts CUDA where torch can use it; makes no tensor."""
    operations = _operations()
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that it loads is missing
        return Torch((), str(error), operations)
    if not torch.cuda.is_available():
        return Torch((), None, operations)
    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found.append(GPU(torch.cuda.get_device_name(index), f"sm_{major}{minor}"))
    return Torch(tuple(found), None, operations)


def _operations() -> tuple[str, ...]:
    import tsmla_bridge

    return tuple(name for name in tsmla_bridge.__all__ if tsmla_bridge._MODULES.get(name, "").startswith("ops."))


def lines_of(report: Torch) -> list[str]:
    """The lines of a report for a terminal."""
    lines = [f"  tensors on a CPU: the reference, for {', '.join(report.operations)}"]
    for gpu in report.gpus:
        lines.append(f"  {gpu.name}  {gpu.arch}: {_runs(gpu.arch)}")
    if not report.gpus:
        lines.append(f"  no GPU that torch can use{f': {report.failure}' if report.failure else ''}")
    return lines


def _runs(arch: str) -> str:
    """A sentence's end that says which kernels run on a GPU of this architecture."""
    target = f"{arch}a"
    served = [name for name in _operations() if _has_kernel(name, target)]
    if not served:
        return "no kernel is written for it"
    if target in PROVEN:
        others = [name for name in _operations() if name not in served]
        return f"kernels, for all but {', '.join(others)}" if others else "kernels, for all of them"
    packages = " (of other packages, extra blackwell, for attention and the indexer's logits)"
    return (
        f"kernels that have not run on such a GPU, only where implementation='cute' names them: {', '.join(served)}"
        f"{packages if target in sm100.ARCHS else ''}"
    )


_MADE_OF = {"indexer_topk": "indexer_logits", "mla_prefill_kv": "mla_prefill"}
"""Operations without a kernel of their own name, each with the operation whose kernel decides."""


def _has_kernel(name: str, arch: str) -> bool:
    """Whether torch can launch a kernel of an operation on the architecture."""
    name = _MADE_OF.get(name, name)
    return any(arch in KERNELS[each].archs for each in (name, f"{name}_sm100") if each in KERNELS)
