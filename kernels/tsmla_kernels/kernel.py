"""How a kernel is described: its code, its operands, and the calls that it serves; and kernels launched in turn.

A kernel is a class whose instances are `@cute.jit` launchers, built from a frozen config. Its record says where that
class is, which operands the launcher takes in which order for a config, which calls the kernel can't run, and which
config serves the others. The record.py of each kernel's folder has its record, catalog.py the list of them. Imports no
cutlass, jax or torch.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tsmla_kernels.option_values import flag, unserved

Config = Any  # a frozen dataclass of ints, floats, bools, strings and None; each kernel has its own

ITEMSIZE = {
    "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1
}  # fmt: skip
"""Bytes of an element, by the dtype's name."""

PROVEN = ("sm_90a",)
"""The architectures on which kernels have run; on others they must be named."""

GREATEST_SIZE = 2**31 - 1
"""The greatest size of an operand's axis."""

V32_MODEL = "deepseek-v3.2"
"""The name of DeepSeek-V3.2's presets."""

MODELS = (
    ("deepseek-v2", (("num_heads", "128"),)),
    ("deepseek-v2-lite", (("num_heads", "16"),)),
    ("deepseek-v3", (("num_heads", "128"),)),
    ("kimi-k2", (("num_heads", "64"),)),
)
"""Presets: query heads of public models, all with L = 512 and R = 64; tensor_parallel divides them."""


@dataclass(frozen=True)
class Operand:
    """One array of a kernel's launcher, row-major and dense.

    Attributes:
      name: the launcher's parameter.
      dtype: the dtype's name, a key of ITEMSIZE.
      shape: the sizes compiled in, None where the size is read from the array at the launch.
      output: whether the kernel writes it; outputs follow the inputs.
      wide: keep the first axis' stride a 64-bit run-time value even if it is known when compiling: the product of a
        page index and a static stride is computed in 32 bits and wraps beyond 2^31 elements.
      align: the array's address is a multiple of this many bytes.
      alias: the input that this output is written over, in the same memory.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    output: bool = False
    wide: bool = False
    align: int = 16
    alias: str | None = None

    def check(self, shape: tuple[Any, ...], dtype: str) -> None:
        """ValueError unless an array of this shape and dtype may be passed; a symbolic size passes only where
        `self.shape` has None."""
        fits = len(shape) == len(self.shape) and all(
            want is None or want == got for want, got in zip(self.shape, shape, strict=True)
        )
        if not fits or dtype != self.dtype:
            legal = ", ".join("any" if size is None else str(size) for size in self.shape)
            got = ", ".join(map(str, shape))
            raise ValueError(f"{self.name}: got {dtype}[{got}]; the kernel takes {self.dtype}[{legal}]")

    def check_sizes(self, shape: tuple[Any, ...]) -> None:
        """ValueError if an axis is longer than GREATEST_SIZE: kernels hold sizes as int32. Symbolic sizes pass."""
        if any(isinstance(size, int) and size > GREATEST_SIZE for size in shape):
            raise ValueError(f"{self.name}: got [{', '.join(map(str, shape))}]; legal: axes of up to {GREATEST_SIZE}")


@dataclass(frozen=True)
class Package:
    """A package by other authors, from which kernels take their device code.

    Attributes:
      module: the name that it is imported by.
      distribution: the name that it is installed by.
      install: the command that installs it.
      checked: the version that the kernels were checked with; taken as the objects' version if the package
        isn't installed.
    """

    module: str
    distribution: str
    install: str
    checked: str

    @property
    def version(self) -> str:
        """The installed version, found without importing the package, else `checked`."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return self.checked


@dataclass(frozen=True)
class Kernel:
    """How one kernel is made.

    Attributes:
      name: unique among all kernels of all architectures.
      archs: the architectures it can be compiled for, as in CUTE_DSL_ARCH.
      launcher: "module:name"; name(config), a class or a function, is the `@cute.jit` callable (stream, *operands). A
        string, because that module imports cutlass: two seconds that a process with a warm cache must not pay.
      config: the config's dataclass.
      operands: the launcher's operands for a config.
      spec_from_options: the spec of the call that options of the command line describe; ValueError if there is none.
      reasons: why the kernel cannot run the call of a spec, apart from the GPU; empty if it can.
      config_for: the config that serves a spec that there are no reasons against.
      flags: names of boolean options that are not in a call's spec; they are parameters of `config_for`.
      presets: options by the name of a model; a name comes again for another operation of the same kernel.
      compiler_options: options for the DSL, in addition to those that every kernel is compiled with.
      package: the package that the device code is from, None if it is this one's.
      instead: a function from a spec to the kernel that its call launches, if that depends on sizes; the kernel takes
        the same options. None if the call always launches this one.
    """

    name: str
    archs: tuple[str, ...]
    launcher: str
    config: type
    operands: Callable[[Any], tuple[Operand, ...]]
    spec_from_options: Callable[[Mapping[str, str]], Any]
    reasons: Callable[[Any], list[str]]
    config_for: Callable[..., Config]
    flags: tuple[str, ...] = ()
    presets: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = MODELS
    compiler_options: str = ""
    package: Package | None = None
    instead: Callable[[Any], Kernel] | None = None

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """This kernel alone. A Chain has the same property, with several kernels."""
        return (self,)

    def arch_reasons(self, arch: str) -> list[str]:
        """Why the kernel can't be compiled for `arch`; empty if it can."""
        if arch in self.archs:
            return []
        return [f"the architecture is {arch}; {self.name} is written for {', '.join(self.archs)}"]

    def from_options(self, given: Mapping[str, str]) -> Config:
        """The config of the call that options of the command line describe, as the call itself gets it.

        Raises:
          ValueError: an option is not legal, or no config serves the call; the message gives the reasons.
        """
        spec = self.spec_from_options({name: value for name, value in given.items() if name not in self.flags})
        if found := self.reasons(spec):
            raise unserved(found)
        return self.config_for(spec, **{name: flag(given, name) for name in self.flags})

    def objects_for(self, given: Mapping[str, str]) -> tuple[tuple[Kernel, Config], ...]:
        """The object of the call of these options: this kernel, or the one launched in its place, and its config."""
        kernel = self
        if self.instead is not None:
            kernel = self.instead(self.spec_from_options({k: v for k, v in given.items() if k not in self.flags}))
        return ((kernel, kernel.from_options(given)),)

    def config_json(self, config: Config) -> str:
        """The config as a line of JSON, the same for equal configs."""
        return json.dumps(dataclasses.asdict(config), sort_keys=True)

    def config_from_fields(self, given: Mapping[str, object]) -> Config:
        """The config of these fields, as `config_json` writes them; ValueError if this version has none like it."""
        fields = {field.name: field for field in dataclasses.fields(self.config)}
        needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if unknown := sorted(given.keys() - fields.keys()):
            raise ValueError(f"{self.name}: got {', '.join(unknown)}; legal: {', '.join(fields)}")
        if missing := sorted(needed - given.keys()):
            raise ValueError(f"{self.name}: got no {', '.join(missing)}; a config has {', '.join(fields)}")
        types = typing.get_type_hints(self.config)
        for name, value in given.items():
            if not isinstance(value, types[name]) or (isinstance(value, bool) and types[name] is not bool):
                legal = getattr(types[name], "__name__", types[name])
                raise ValueError(f"{self.name}: {name}: got {value!r}; legal: {legal}")
        return self.config(**given)


def untested(arch: str) -> str:
    """The reason against a kernel that no one named, on an architecture that is not in PROVEN."""
    return f'{_UNTESTED}{arch}; pass implementation="cute" to use it anyway'


def is_untested(reason: str) -> bool:
    """Whether a reason is that of `untested`."""
    return reason.startswith(_UNTESTED)


_UNTESTED = "the kernel is untested on "


def written_for(arch: str | None, *kernels: Kernel) -> Kernel:
    """The kernel among those of one operation that is written for `arch`; the first one if there is none."""
    return next((kernel for kernel in kernels if arch in kernel.archs), kernels[0])


@dataclass(frozen=True)
class Chain:
    """An operation that launches several kernels in turn, whose configs depend on each other.

    Attributes:
      name: the operation's name, unique among kernels and chains.
      kernels: the kernels in the order of the launches, all for the same architectures.
      spec_from_options, reasons: as in Kernel, for the operation's call.
      configs_for: the configs, one for each kernel, that serve a spec that there are no reasons against.
      presets: as in Kernel.
    """

    name: str
    kernels: tuple[Kernel, ...]
    spec_from_options: Callable[[Mapping[str, str]], Any]
    reasons: Callable[[Any], list[str]]
    configs_for: Callable[[Any], tuple[Config, ...]]
    presets: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures that its kernels can be compiled for."""
        return self.kernels[0].archs

    def objects_for(self, given: Mapping[str, str]) -> tuple[tuple[Kernel, Config], ...]:
        """Each kernel with its config for the call of these options; ValueError as `Kernel.from_options`."""
        spec = self.spec_from_options(given)
        if found := self.reasons(spec):
            raise unserved(found)
        return tuple(zip(self.kernels, self.configs_for(spec), strict=True))
