"""The text of a PTX module as functions, instructions and operands (PTX ISA 8.x and 9.x, what the CuTe DSL writes)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "f16": 16, "f32": 32, "f64": 64}
WIDTHS |= {f"{kind}{width}": width for kind in "us" for width in (8, 16, 32, 64)}

DYNAMIC_SHARED = 1024
"""Where dynamic shared memory begins: Hopper keeps the first kilobyte of a block's for itself."""


class Guard(NamedTuple):
    """An instruction runs in lanes in which `register` is true, or false if `negated`."""

    register: str
    negated: bool


class Instruction(NamedTuple):
    """Attributes:
    name: the part of the opcode before its first dot. modifiers: the other parts.
    operands: as they are written. line: in the module's text, from 1.
    """

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: Guard | None
    line: int

    @property
    def opcode(self) -> str:
        return ".".join((self.name, *self.modifiers))

    @property
    def type(self) -> str:
        """The last type among the modifiers: that of the operands, or of the source of a conversion."""
        return next(modifier for modifier in reversed(self.modifiers) if modifier in WIDTHS)


class Label(NamedTuple):
    name: str


class Parameter(NamedTuple):
    name: str
    size: int
    offset: int
    """In the function's parameters, one after another."""


@dataclass
class Function:
    """A kernel.

    Attributes:
      registers: the width in bits of every register, by name; a register of an inner scope has the scope in its name.
      shared: the offset in a block's shared memory of each name.
      threads: in a block.
    """

    name: str
    parameters: dict[str, Parameter]
    registers: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    body: list[Instruction | Label] = field(default_factory=list)
    threads: int = 0

    @property
    def parameter_bytes(self) -> int:
        last = max(self.parameters.values(), key=lambda parameter: parameter.offset)
        return last.offset + last.size


_ENTRY = re.compile(r"\.visible \.entry (\w+)\s*\(")
_PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.(\w+) (\w+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared (?:\.align (\d+) )?\.(\w+) (\w+)(?:\[(\d*)\])?")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(.*)")
_NAME_OR_RANGE = re.compile(r"([%\w$]+)(?:<(\d+)>)?")
_LABEL = re.compile(r"(?:^|;)\s*([\w$]+):(?!:)")
_GUARD = re.compile(r"@(!?)([%\w]+)\s+(.*)")
_WORD = re.compile(r"[%$]?[A-Za-z_][\w$]*")
_IGNORED = (".pragma", ".loc", ".file", ".section", ".minnctapersm", ".maxntid", ".reqnctapercluster", ".maxnreg")


def parse(text: str) -> dict[str, Function]:
    """The kernels of a module, by name."""
    functions: dict[str, Function] = {}
    shared: dict[str, int] = {}
    lines = [re.sub(r"//.*", "", line) for line in text.splitlines()]
    index = 0
    while index < len(lines):
        line = lines[index].strip()
        if match := _ENTRY.match(line):
            start = index
            while not lines[index].strip().startswith("{"):
                index += 1
            head = " ".join(lines[start:index])
            end = _end_of_body(lines, index)
            function = Function(match[1], dict(_parameters(head)), shared=dict(shared))
            function.threads = _product(re.search(r"\.(?:reqntid|maxntid)\s+([\d, ]+)", head))
            _Body(function, index + 1).read(lines[index + 1 : end])
            functions[function.name] = function
            index = end
        elif line.startswith((".extern .shared", ".shared")):
            _declare_shared(line, shared)
        index += 1
    return functions


def _end_of_body(lines: list[str], start: int) -> int:
    depth = 0
    for index in range(start, len(lines)):
        depth += lines[index].count("{") - lines[index].count("}")
        if not depth:
            return index
    raise ValueError(f"line {start + 1}: the body does not end")


def _product(match: re.Match[str] | None) -> int:
    if match is None:
        raise ValueError("a kernel does not say how many threads a block has")
    product = 1
    for number in match[1].split(","):
        product *= int(number)
    return product


def _parameters(head: str) -> Iterator[tuple[str, Parameter]]:
    end = 0
    for match in _PARAMETER.finditer(head):
        align, kind, name, count = match.groups()
        element = WIDTHS[kind] // 8
        aligned = int(align or element)
        offset = -(-end // aligned) * aligned
        parameter = Parameter(name, element * int(count or 1), offset)
        end = offset + parameter.size
        yield name, parameter


def _declare_shared(line: str, shared: dict[str, int]) -> None:
    match = _SHARED.search(line)
    if match is None or match[4]:
        raise ValueError(f"only dynamic shared memory is known: {line!r}")
    shared[match[3]] = DYNAMIC_SHARED


class _Body:
    """Reads the statements of a function. Braces open scopes with registers and labels of their own."""

    def __init__(self, function: Function, first_line: int) -> None:
        self.function, self.first_line = function, first_line
        self.scopes: list[dict[str, str]] = [{}]
        self.opened = 0

    def read(self, lines: list[str]) -> None:
        statement = ""
        for number, line in enumerate(lines, self.first_line + 1):
            rest = line.strip()
            while rest:
                if not statement and rest[0] in "{}":
                    self._scope(rest[0], [rest[1:], *lines[number - self.first_line :]])
                    rest = rest[1:].strip()
                    continue
                if not statement and (match := re.match(r"([\w$]+):\s*(?![\w:])", rest)):
                    self.function.body.append(Label(self._resolve(match[1])))
                    rest = rest[match.end() :].strip()
                    continue
                end = rest.find(";")
                if end < 0:
                    statement, rest = f"{statement} {rest}".strip(), ""
                else:
                    self._statement(f"{statement} {rest[:end]}".strip(), number)
                    statement, rest = "", rest[end + 1 :].strip()

    def _scope(self, brace: str, following: list[str]) -> None:
        if brace == "}":
            self.scopes.pop()
            return
        self.opened += 1
        names: dict[str, str] = {}
        for line in following:
            text, closed, _ = re.sub(r"\{[^{}]*\}", "", line).partition("}")
            names |= {label: f"{label}@{self.opened}" for label in _LABEL.findall(text)}
            if closed:
                break
        self.scopes.append(names)

    def _resolve(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def _statement(self, text: str, line: int) -> None:
        if match := _REGISTERS.match(text):
            self._registers(WIDTHS[match[1]], match[2])
            return
        if text.startswith(_IGNORED) or not text:
            return
        guard = None
        if match := _GUARD.match(text):
            guard, text = Guard(self._resolve(match[2]), bool(match[1])), match[3]
        opcode, _, rest = text.partition(" ")
        name, *modifiers = opcode.strip().split(".")
        operands = tuple(_WORD.sub(lambda word: self._resolve(word[0]), operand) for operand in split(rest))
        self.function.body.append(Instruction(name, tuple(modifiers), operands, guard, line))

    def _registers(self, width: int, names: str) -> None:
        for name, count in _NAME_OR_RANGE.findall(names):
            if count:
                self.function.registers |= {f"{name}{i}": width for i in range(int(count))}
            elif len(self.scopes) > 1:
                self.scopes[-1][name] = f"{name}@{self.opened}"
                self.function.registers[f"{name}@{self.opened}"] = width
            else:
                self.function.registers[name] = width


def split(operands: str) -> list[str]:
    """A list of operands at its commas, those inside of braces and brackets apart."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(operands):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and not depth:
            parts.append(operands[start:position].strip())
            start = position + 1
    last = operands[start:].strip()
    return [*parts, last] if last else parts
