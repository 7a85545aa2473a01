"""The resources of a compiled object's kernels, read from the cubin inside it: needs no GPU and no CUDA tools.

A cubin is an ELF file of machine EM_CUDA. Registers, stack and so on are attributes in its .nv.info sections, laid out
as `cuobjdump -elf` prints them. Serialised WGMMA is reported by the assembler only, so it is read from the log that the
compilation left in the object.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tsmla_kernels.compile import CompiledObject

EM_CUDA = 190
_SVAL = 4  # an attribute that is followed by a payload of the size it says; all others are 4 bytes long
_REGISTERS, _FRAME, _MIN_STACK = 0x2F, 0x11, 0x12
# ptxas C7508 to C7519: wgmma.mma_async instructions are serialized, with the reason. The log is wrapped and coloured.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SERIALISED = re.compile(r"\(C75\d\d\) .*?wgmma.*?(?= ptxas (?:info|warning)|$)")


@dataclass(frozen=True)
class KernelResources:
    """The resources of one device function. stack_bytes is the local memory of a thread, for spilled registers and for
    arrays indexed at run time: 0 in a kernel that keeps everything in registers."""

    name: str
    registers: int
    stack_bytes: int
    static_smem_bytes: int
    code_bytes: int


@dataclass(frozen=True)
class ResourceReport:
    """Every kernel of an object, and the assembler's remarks about serialised WGMMA."""

    kernels: tuple[KernelResources, ...]
    serialised: tuple[str, ...]


def resource_report(compiled: CompiledObject) -> ResourceReport:
    """The resources of every kernel in a compiled object. ValueError if there is no cubin in it."""
    said = " ".join(_COLOUR.sub("", compiled.log).split())
    serialised = tuple(dict.fromkeys(_SERIALISED.findall(said)))
    return ResourceReport(cubin_resources(cubin_of(compiled.module)), serialised)


def cubin_of(module: bytes) -> bytes:
    """The cubin inside a host object."""
    start = 0
    while (start := module.find(b"\x7fELF", start + 1)) >= 0:
        if int.from_bytes(module[start + 18 : start + 20], "little") == EM_CUDA:
            return module[start:]
    raise ValueError(f"module: got {len(module)} bytes without a cubin")


def cubin_resources(cubin: bytes) -> tuple[KernelResources, ...]:
    """Registers, stack, static shared memory and code size of every kernel in a cubin."""
    sections = list(_sections(cubin))
    names = {name: index for index, (name, _, _) in enumerate(sections)}
    symbols = _symbols(cubin, sections[names[".symtab"]], sections[names[".strtab"]])
    attributes: dict[str, dict[int, int]] = {}
    for attribute, payload in _attributes(cubin, sections[names[".nv.info"]]):
        if attribute in (_REGISTERS, _FRAME, _MIN_STACK) and len(payload) == 8:
            symbol, value = struct.unpack("<II", payload)
            attributes.setdefault(symbols[symbol], {})[attribute] = value
    found = []
    for name, _, size in sections:
        if name.startswith(".text."):
            kernel = name.removeprefix(".text.")
            values = attributes.get(kernel, {})
            shared = names.get(f".nv.shared.{kernel}")
            found.append(
                KernelResources(
                    kernel,
                    registers=values[_REGISTERS],
                    stack_bytes=max(values.get(_FRAME, 0), values.get(_MIN_STACK, 0)),
                    static_smem_bytes=0 if shared is None else sections[shared][2],
                    code_bytes=size,
                )
            )
    return tuple(found)


_Section = tuple[str, int, int]  # name, offset, size


def _sections(elf: bytes) -> Iterator[_Section]:
    table = struct.unpack_from("<Q", elf, 40)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + entry_size * i) for i in range(count)]
    strings = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        yield _string(elf, strings + name), offset, size


def _symbols(elf: bytes, section: _Section, strings: _Section) -> list[str]:
    _, offset, size = section
    starts = range(offset, offset + size, 24)
    return [_string(elf, strings[1] + struct.unpack_from("<I", elf, start)[0]) for start in starts]


def _attributes(elf: bytes, section: _Section) -> Iterator[tuple[int, bytes]]:
    _, position, size = section
    end = position + size
    while position < end:
        form, attribute, length = struct.unpack_from("<BBH", elf, position)
        position += 4
        payload = elf[position : position + length] if form == _SVAL else b""
        position += len(payload)
        yield attribute, payload


def _string(elf: bytes, start: int) -> str:
    return elf[start : elf.index(b"\0", start)].decode()
