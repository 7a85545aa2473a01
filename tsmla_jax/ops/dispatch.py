"""Which implementation of an operation runs a call, and why the others can't.

An operation is a folder tsmla_jax/ops/<op>/ with one module an implementation. Each module has a function named like
the operation; one that can't run everything also has `why_not(spec) -> list[str]`, the reasons against this call,
empty when it can, and one that can be named where it should not be chosen (a kernel lowered for a GPU that isn't
there) has `why_not_by_default(spec)`. What is to be known of one beside that, `notes(spec)` says. Modules are imported
at the first call that considers them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tsmla_kernels import contract

IMPLEMENTATIONS = ("cute", "xla", "reference")
"""Best first: the order in which implementation=None tries them."""

NO_KERNEL = "there is no kernel for this operation yet"


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: the implementation that None picks (or that was named), and for every implementation the
    reasons why it can't run this call, none when it can. `notes` is what else is to be known of an implementation."""

    op: str
    spec: Any
    chosen: str | None
    reasons: dict[str, tuple[str, ...]]
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen or 'nothing'} runs this call"]
        for name, reasons in self.reasons.items():
            lines.append(f"  {name}: {'; '.join(reasons) if reasons else 'can run'}")
            lines += [f"    {note}" for note in self.notes.get(name, ())]
        return "\n".join(lines)


def why_not(op: str, implementation: str, spec: Any, *, named: bool = True) -> list[str]:
    """The reasons why `implementation` can't run this call of `op`, or (not named) why None doesn't choose it; empty if
    there are none."""
    module = _module(op, implementation)
    if module is None:
        return [NO_KERNEL]
    found: list[str] = []
    for name in ("why_not",) if named else ("why_not", "why_not_by_default"):
        reasons: Callable[[Any], list[str]] | None = getattr(module, name, None)
        found += [reason for reason in (reasons(spec) if reasons else []) if reason not in found]
    return found


def explain_spec(op: str, spec: Any, implementation: str | None) -> Explanation:
    """The explanation of a call whose arguments gave `spec`."""
    _check_name(implementation)
    named = implementation is not None
    reasons = {name: tuple(why_not(op, name, spec, named=named)) for name in IMPLEMENTATIONS}
    candidates = IMPLEMENTATIONS if implementation is None else (implementation,)
    chosen = next((name for name in candidates if not reasons[name]), None)
    notes = {name: found for name in IMPLEMENTATIONS if (found := _notes(op, name, spec))}
    return Explanation(op, spec, chosen, reasons, notes)


def select(op: str, spec: Any, implementation: str | None) -> Callable[..., Any]:
    """The function of the implementation that runs this call.

    ValueError for an unknown name; NotImplementedError, with every reason, if the named one can't run."""
    _check_name(implementation)
    refused: list[str] = []
    for name in IMPLEMENTATIONS if implementation is None else (implementation,):
        reasons = why_not(op, name, spec, named=implementation is not None)
        if not reasons:
            return getattr(_module(op, name), op.rpartition(".")[2])
        refused += reasons if implementation else [f"{name}: {'; '.join(reasons)}"]
    raise contract.not_runnable(op, implementation or "None", refused)


def _notes(op: str, implementation: str, spec: Any) -> tuple[str, ...]:
    notes: Callable[[Any], list[str]] | None = getattr(_module(op, implementation), "notes", None)
    return tuple(notes(spec)) if notes else ()


def _check_name(implementation: str | None) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise contract.unknown_implementation(implementation, IMPLEMENTATIONS)


def _module(op: str, implementation: str) -> Any:
    name = f"tsmla_jax.ops.{op}.{implementation}"
    if importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name)
