"""Operation: a public function, the spec of its calls, and its implementations in an explicit table.

An operation is a folder tsmla_jax/ops/<op>/. Its api.py holds the public function and the `Operation`, whose table is a
small function that imports the implementations. They are imported at the first call of the operation, so that `import
tsmla_jax` stays fast and brings no compiler.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from tsmla_jax.ops.loops import carry
from tsmla_kernels import contract
from tsmla_kernels.kernel import is_untested

IMPLEMENTATIONS = ("cute", "xla", "reference")
"""Best first: the order in which implementation=None tries them."""

Preference = str | Sequence[str] | None
"""The argument `implementation` of every operation: a name, several names that are tried in their order, or None for
the best implementation that can run the call."""

NO_KERNEL = "there is no kernel for this operation yet"

BY_PLATFORM = "runs in programs that are lowered for an NVIDIA GPU, as by jax.export"
"""The note on a kernel that None chooses in such programs, and not for jax's default device."""


@dataclass(frozen=True)
class Explanation:
    """The findings of `explain`; str() gives them as text.

    Attributes:
      op: the operation's name.
      spec: the spec (of tsmla_kernels.contract) that the contract made from the arguments.
      chosen: the implementation that None picks, or the first that was named and can run; None if there is none.
      reasons: for every implementation, the reasons why it can't run this call, or why None doesn't choose it; empty if
        there are none.
      notes: further facts about an implementation.
    """

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


def _nothing(*_: Any) -> list[str]:
    return []


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    run: the computation, a function of jax arrays and keyword options.
    why_not: takes the call's spec; returns the reasons why the implementation can't run that call; empty if it can.
    why_not_by_default: returns the reasons why implementation=None must not pick it, though it may be named.
    notes: takes the spec; returns facts about the call that `explain` shows.
    """

    run: Callable[..., Any]
    why_not: Callable[[Any], list[str]] = _nothing
    why_not_by_default: Callable[[], list[str]] = _nothing
    notes: Callable[[Any], list[str]] = _nothing

    def call(self, arrays: Sequence[Any], out_specs: Callable[[], Any], *, spec: Any, **options: Any) -> Any:
        """run(*arrays, spec=spec, **options) on arrays whose sharding may be part of their type (explicit mesh axes).

        jax refuses gathers and reshapes of explicitly sharded axes instead of partitioning them. Inside, `run` sees
        those axes as automatic ones; outside, its results have the PartitionSpecs that out_specs() returns.
        """
        operands = [x for x in jax.tree.leaves((arrays, options)) if isinstance(x, jax.Array)]
        meshes = (jax.typeof(x).sharding.mesh for x in operands)
        mesh: Any = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
        if mesh is None:
            return self.run(*arrays, spec=spec, **options)

        def automatic(arrays: Sequence[Any], options: dict[str, Any]) -> Any:
            return self.run(*arrays, spec=spec, **options)

        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
        with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
            return jax.sharding.auto_axes(automatic, axes=axes, out_sharding=out_specs())(arrays, options)


@dataclass(frozen=True)
class Operation:
    """A public function with its implementations.

    function: the public function, which has the operation's name.
    spec: takes the function's arguments by keyword (without `implementation`); returns the contract's spec of the call.
    implementations: returns the table of implementations by name, for some of IMPLEMENTATIONS.
    """

    function: Callable[..., Any]
    spec: Callable[..., Any]
    implementations: Callable[[], Mapping[str, Implementation]]

    @property
    def name(self) -> str:
        return self.function.__name__

    @functools.cached_property
    def table(self) -> Mapping[str, Implementation]:
        """The implementations, imported at the first call."""
        return self.implementations()

    def spec_of(self, *args: Any, **kwargs: Any) -> Any:
        """The spec of the call function(*args, **kwargs)."""
        signature = inspect.signature(self.function)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(
                f"{self.name}: {error}; explain takes the operation's own arguments after its name, arrays or"
                f" jax.ShapeDtypeStruct: {self.name}({', '.join(signature.parameters)})"
            ) from None
        return self.spec(**given)

    def choose(self, *, implementation: Preference, **arguments: Any) -> tuple[Any, Implementation]:
        """The spec of a call and the implementation that runs it. A public function begins with choose(**locals()):
        its arguments are all its locals there, so their names and order are written once, in its signature.

        Raises what `spec` and `select` raise.
        """
        spec = self.spec(**arguments)
        return spec, self.select(spec, implementation)

    def why_not(self, implementation: str, spec: Any, *, named: bool = True) -> list[str]:
        """The reasons why `implementation` can't run this call, or, if `named` is False, why None doesn't choose it;
        empty if there are none.
        """
        found = self.table.get(implementation)
        if found is None:
            return [NO_KERNEL]
        reasons = found.why_not(spec)
        by_default = [] if named else found.why_not_by_default()
        # A kernel that can't run can't be used by naming it either.
        return reasons + [each for each in by_default if each not in reasons and not (reasons and is_untested(each))]

    def select(self, spec: Any, implementation: Preference) -> Implementation:
        """The implementation that runs this call.

        Raises a ValueError if `names` does, and a NotImplementedError, with every reason, if no named implementation
        can run.
        """
        tried, named = names(implementation), implementation is not None
        refused: list[str] = []
        kernel: Implementation | None = None
        for name in tried:
            reasons = self.why_not(name, spec, named=named)
            if not reasons:
                found = self.table[name]
                return found if kernel is None else by_platform(kernel, found)
            if not named and self._runs_on_gpus(name, spec):
                kernel = self.table[name]
            refused += reasons if isinstance(implementation, str) else [f"{name}: {'; '.join(reasons)}"]
        asked = implementation if isinstance(implementation, str) else tried if named else "None"
        raise contract.not_runnable(self.name, asked, refused)

    def _runs_on_gpus(self, implementation: str, spec: Any) -> bool:
        """Whether nothing but the platform of jax's default device keeps None from this implementation: the call may be
        in a program that is lowered for a GPU."""
        from tsmla_jax.ops import device

        if implementation not in self.table or self.table[implementation].why_not(spec):
            return False
        reasons = self.table[implementation].why_not_by_default()
        return bool(reasons) and reasons == device.why_not_by_default()

    def explain(self, *args: Any, implementation: Preference = None, **kwargs: Any) -> Explanation:
        """The explanation of the call function(*args, **kwargs); raises what the call raises for illegal arguments."""
        spec = self.spec_of(*args, **kwargs)
        tried, named = names(implementation), implementation is not None
        reasons = {name: tuple(self.why_not(name, spec, named=named)) for name in IMPLEMENTATIONS}
        chosen = next((name for name in tried if not reasons[name]), None)
        notes = {name: tuple(found) for name, each in self.table.items() if (found := each.notes(spec))}
        for name in IMPLEMENTATIONS if not named else ():
            if self._runs_on_gpus(name, spec):
                notes[name] = (*notes.get(name, ()), BY_PLATFORM)
        return Explanation(self.name, spec, chosen, reasons, notes)


def by_platform(kernel: Implementation, other: Implementation) -> Implementation:
    """`kernel` in programs that are lowered for NVIDIA GPUs, `other` in those lowered for other platforms, and outside
    of jit."""

    def run(*arrays: Any, **options: Any) -> Any:
        operands = [x for x in jax.tree.leaves((arrays, options)) if isinstance(x, jax.Array)]

        def varying(each: Implementation) -> Any:
            # Under shard_map both must have results of one type: a kernel's results vary over all mesh axes that any
            # operand varies over.
            return jax.tree.map(lambda x: carry(x, *operands), each.run(*arrays, **options))

        # Both are traced; only the one for the platform is lowered.
        return lax.platform_dependent(cuda=lambda: varying(kernel), default=lambda: varying(other))

    return Implementation(run)


def names(implementation: Preference) -> tuple[str, ...]:
    """The implementations that a call tries, in order.

    Raises a ValueError for an unknown name, for a value that is no name, and for an empty sequence."""
    if implementation is None:
        return IMPLEMENTATIONS
    if isinstance(implementation, bytes) or not isinstance(implementation, str | Sequence):
        raise contract.unknown_implementation(implementation, IMPLEMENTATIONS)
    tried = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    for name in tried:
        if name not in IMPLEMENTATIONS:
            raise contract.unknown_implementation(name, IMPLEMENTATIONS)
    if not tried:
        raise contract.unknown_implementation(implementation, IMPLEMENTATIONS)
    return tried


def row_specs(x: jax.Array) -> tuple[PartitionSpec, PartitionSpec]:
    """The PartitionSpecs of an out and its lse: out has the axes of x with another last one, lse has them without the
    last.
    """
    rows = tuple(same_spec(x))[: x.ndim - 1]
    rows += (None,) * (x.ndim - 1 - len(rows))
    return PartitionSpec(*rows, None), PartitionSpec(*rows)


def same_spec(x: jax.Array) -> PartitionSpec:
    """The spec of an array sharded like x."""
    return jax.typeof(x).sharding.spec
