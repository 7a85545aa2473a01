"""A function of PTX as the numbers that the machine runs: each instruction's handler and the slots of its operands.

A slot is a register of a warp, one value a lane. Constants, addresses of parameters and special registers have slots of
their own behind the registers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from tests.emulator.ptx.program import Function, Instruction, Label, split

NONE = -1

SPECIAL = (
    *("%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z"),
    *("%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z"),
    *("%laneid", "%warpid", "%cluster_ctarank", "%cluster_nctarank"),
    *("%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_ctaid.z"),
    *("%cluster_nctaid.x", "%cluster_nctaid.y", "%cluster_nctaid.z"),
    *("%clusterid.x", "%clusterid.y", "%clusterid.z", "%nclusterid.x", "%nclusterid.y", "%nclusterid.z"),
    *("%dynamic_smem_size", "%clock"),
)
"""In the order in which machine.cpp numbers them."""

NUMBER, IN_PARAMETERS, IN_SHARED, FIRST_SPECIAL = 0, 1, 2, 16
"""What a constant is."""

ROUNDING = {"rn", "satfinite", "rm", "rp", "ftz", "approx", "full"}
ORDERING = {
    *("relaxed", "acquire", "release", "acq_rel", "volatile", "weak", "nc", "cta", "gpu", "sys", "cluster", "async"),
    *("L1::no_allocate", "L1::evict_last", "L1::evict_first", "L2::128B", "L2::256B", "L2::64B"),
}
NOTHING = (
    *("griddepcontrol.launch_dependents", "prefetch", "prefetchu", "setmaxnreg", "membar", "fence.mbarrier_init"),
    *("fence.acq_rel", "fence.sc", "fence.proxy.tensormap", "fence.proxy.async.global", "wgmma.fence", "discard"),
    "applypriority",
)
"""Opcodes, or their beginnings, that change nothing here."""


class Kind(IntEnum):
    """As in state.hpp."""

    PLAIN, BRANCH, EXIT, CONVERGE = range(4)


class Encoding(NamedTuple):
    """Attributes:
    handler: its name in the machine. slots: of the operands.
    members: the slot of the mask of lanes that must meet; NONE for all of the warp. aux: see the handler.
    """

    handler: str
    slots: Sequence[int]
    kind: Kind = Kind.PLAIN
    members: int = NONE
    aux: int = 0


class Encoded(NamedTuple):
    """Attributes:
    words: of each instruction: handler, kind, guard, negated, line, members, aux, count, slots.
    handlers: the names that the first words number. opcodes: of each instruction.
    constants: each with what it is.
    """

    function: Function
    words: list[int]
    handlers: list[str]
    opcodes: list[str]
    constants: list[tuple[int, int]]


def encode(function: Function) -> Encoded:
    """Raises NotImplementedError for an instruction that the machine doesn't know."""
    return _Encoder(function).encode()


class _Encoder:
    def __init__(self, function: Function) -> None:
        self.function = function
        self.registers = {name: number for number, name in enumerate(function.registers)}
        self.constants: dict[tuple[int, int], int] = {}
        self.labels: dict[str, int] = {}

    def encode(self) -> Encoded:
        instructions: list[Instruction] = []
        for statement in self.function.body:
            if isinstance(statement, Label):
                self.labels[statement.name] = len(instructions)
            else:
                instructions.append(statement)
        instructions.append(Instruction("ret", (), (), None, 0))
        handlers: dict[str, int] = {}
        words: list[int] = []
        for instruction in instructions:
            encoding = self.instruction(instruction)
            handler = handlers.setdefault(encoding.handler, len(handlers))
            guard, negated = NONE, 0
            if instruction.guard is not None:
                guard, negated = self.registers[instruction.guard.register], int(instruction.guard.negated)
            head = (handler, encoding.kind, guard, negated, instruction.line, encoding.members, encoding.aux)
            words += [*head, len(encoding.slots), *encoding.slots]
        opcodes = [instruction.opcode for instruction in instructions]
        return Encoded(self.function, words, list(handlers), opcodes, list(self.constants))

    # Operands

    def constant(self, value: int, kind: int = NUMBER) -> int:
        key = (value & (1 << 64) - 1, kind)
        return len(self.registers) + self.constants.setdefault(key, len(self.constants))

    def slot(self, operand: str) -> int:
        """The slot of a register, a number, a special register, or the address of a name."""
        if operand in ("_", ""):
            return NONE
        if operand in self.registers:
            return self.registers[operand]
        if operand in SPECIAL:
            return self.constant(0, FIRST_SPECIAL + SPECIAL.index(operand))
        if operand in self.function.parameters:
            return self.constant(self.function.parameters[operand].offset, IN_PARAMETERS)
        if operand in self.function.shared:
            return self.constant(self.function.shared[operand], IN_SHARED)
        if operand.startswith("%clock") or operand.startswith("%globaltimer"):
            return self.constant(0, FIRST_SPECIAL + SPECIAL.index("%clock"))
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            return self.constant(int(match[1], 16))
        if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", operand):
            return self.constant(struct.unpack("<I", struct.pack("<f", float(operand)))[0])
        return self.constant(int(operand.rstrip("U"), 0))

    def slots(self, operand: str) -> list[int]:
        """Those of a list in braces, or the one of another operand."""
        return [self.slot(part) for part in split(operand[1:-1])] if operand.startswith("{") else [self.slot(operand)]

    def address(self, operand: str) -> list[int]:
        """[base], [base + offset], without or with brackets: the slots of both."""
        match = re.fullmatch(r"([^+]+?)\s*(?:\+\s*(-?\w+))?", operand.strip("[] "))
        if match is None:
            raise NotImplementedError(f"an address like {operand}")
        return [self.slot(match[1]), self.constant(int(match[2] or "0", 0))]

    def with_predicate(self, operand: str) -> list[int]:
        register, _, predicate = operand.partition("|")
        return [self.slot(register), self.slot(predicate)]

    # Instructions

    def instruction(self, i: Instruction) -> Encoding:
        if i.opcode.startswith(NOTHING):
            return Encoding("nop", ())
        if i.name in ("bra", "brx"):
            return Encoding("", (self.labels[i.operands[0]],), Kind.BRANCH)
        if i.name in ("ret", "exit"):
            return Encoding("", (), Kind.EXIT)
        special = _SPECIAL_FORMS.get(i.name)
        return special(self, i) if special else self.arithmetic(i)

    def arithmetic(self, i: Instruction) -> Encoding:
        name = i.opcode
        if i.name in ("add", "sub", "mul", "div", "fma", "sqrt"):
            name = ".".join((i.name, *(m for m in i.modifiers if m not in ROUNDING)))
        return Encoding(name, [slot for operand in i.operands for slot in self.slots(operand)])

    def conversion(self, i: Instruction) -> Encoding:
        parts = [m for m in i.modifiers if m not in ROUNDING]
        return Encoding(".".join(("cvt", *parts)), [self.slot(operand) for operand in i.operands])

    def move(self, i: Instruction) -> Encoding:
        to, source = i.operands
        width = {"b32": 32, "b64": 64}.get(i.type, 0)
        if source.startswith("{"):
            parts = self.slots(source)
            return Encoding("pack", (self.slot(to), *parts), aux=width // len(parts))
        if to.startswith("{"):
            parts = self.slots(to)
            return Encoding("unpack", (*parts, self.slot(source)), aux=width // len(parts))
        return Encoding("mov", (self.slot(to), self.slot(source)))

    def address_space(self, i: Instruction) -> Encoding:
        slots = [self.slot(operand) for operand in i.operands]
        if "shared" not in i.opcode:
            return Encoding("mov", slots)
        return Encoding("from_generic" if "to" in i.modifiers else "to_generic", slots)

    def memory(self, i: Instruction) -> Encoding:
        space = "shared" if any(m.startswith("shared") for m in i.modifiers) else "global"
        vector = next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)
        name = f"{i.name}.{space}.{i.type}"
        if i.name == "ld":
            return Encoding(name, (*self.slots(i.operands[0]), *self.address(i.operands[1])), aux=vector)
        if "async" in i.modifiers:
            to, values, barrier = i.operands
            slots = (*self.address(to), *self.address(barrier), *self.slots(values))
            return Encoding("store_later", slots, aux=vector)
        return Encoding(name, (*self.address(i.operands[0]), *self.slots(i.operands[1])), aux=vector)

    def atomic(self, i: Instruction) -> Encoding:
        space = "shared" if any(m.startswith("shared") for m in i.modifiers) else "global"
        operation = next(m for m in i.modifiers if m in ("add", "min", "max", "or", "and", "exch", "cas"))
        name = f"atom.{space}.{operation}.{i.type}"
        if operation == "cas":
            to, where, expected, value = i.operands
            return Encoding(name, (self.slot(to), *self.address(where), self.slot(expected), self.slot(value)))
        if i.name == "red":
            values = self.slots(i.operands[1])
            if len(values) > 1:
                return Encoding(
                    f"red.{space}.{operation}.{i.type}", (*self.address(i.operands[0]), *values), aux=len(values)
                )
            return Encoding(name, (*self.address(i.operands[0]), *values))
        to, where, value = i.operands
        return Encoding(name, (self.slot(to), *self.address(where), self.slot(value)), aux=1)

    def exchange(self, i: Instruction) -> Encoding:
        form = ("idx", "up", "down", "bfly").index(i.modifiers[1])
        to, value, b, c, members = i.operands
        slots = (*self.with_predicate(to), self.slot(value), self.slot(b), self.slot(c))
        return Encoding("shfl", slots, Kind.CONVERGE, self.slot(members), form)

    def ballot(self, i: Instruction) -> Encoding:
        to, value, members = i.operands
        form = ("all", "any", "ballot", "uni").index(i.modifiers[1])
        return Encoding("vote", (self.slot(to), self.slot(value)), Kind.CONVERGE, self.slot(members), form)

    def reduction(self, i: Instruction) -> Encoding:
        to, value, members = i.operands
        name = f"redux.{i.modifiers[1]}.{i.type}"
        return Encoding(name, (self.slot(to), self.slot(value)), Kind.CONVERGE, self.slot(members))

    def election(self, i: Instruction) -> Encoding:
        to, members = i.operands
        return Encoding("elect", self.with_predicate(to), Kind.CONVERGE, self.slot(members))

    def matrix(self, i: Instruction) -> Encoding:
        aux = next(int(m[1:]) for m in i.modifiers if m in ("x1", "x2", "x4")) | ("trans" in i.modifiers) << 3
        loads = i.name == "ldmatrix"
        registers, where = i.operands if loads else reversed(i.operands)
        parts, place = self.slots(registers), self.address(where)
        return Encoding(i.name, [*parts, *place] if loads else [*place, *parts], Kind.CONVERGE, aux=aux)

    def barrier(self, i: Instruction) -> Encoding:
        """bar and barrier of a block, of a warp and of a cluster."""
        if "warp" in i.modifiers:
            return Encoding("bar.warp", (), Kind.CONVERGE, self.slot(i.operands[0]))
        if "cluster" in i.modifiers:
            name = "cluster.arrive" if "arrive" in i.modifiers else "cluster.wait"
            return Encoding(name, (), Kind.CONVERGE, aux=int("relaxed" in i.modifiers))
        if "red" in i.modifiers:
            if "or" not in i.modifiers:
                raise NotImplementedError(i.opcode)
            slots = [self.slot(operand) for operand in i.operands]
        else:
            numbers = [self.slot(operand) for operand in i.operands]
            slots = [NONE, *numbers, *[NONE] * (3 - len(numbers))]
        return Encoding("bar", slots, Kind.CONVERGE, aux=int("arrive" not in i.modifiers))

    def mbarrier(self, i: Instruction) -> Encoding:
        if i.modifiers[0] in ("try_wait", "test_wait"):
            if "parity" not in i.modifiers:
                raise NotImplementedError(i.opcode)
            to, where, parity = i.operands[:3]
            return Encoding("mbarrier.test", (self.slot(to), *self.address(where), self.slot(parity)))
        if i.modifiers[0] == "inval":
            return Encoding("nop", ())
        form = {"arrive": 0, "expect_tx": 2, "init": 3}[i.modifiers[0]]
        if form == 0 and "expect_tx" in i.modifiers:
            form = 1
        operands = i.operands if form > 1 else i.operands[1:]  # the state that an arrival returns is not used
        count = self.slot(operands[1]) if len(operands) > 1 else NONE
        return Encoding("mbarrier.arrive", (*self.address(operands[0]), count), aux=form)

    def fence(self, i: Instruction) -> Encoding:
        if i.opcode.startswith("fence.proxy.async"):
            return Encoding("fence.proxy.async", ())
        raise NotImplementedError(i.opcode)

    def copy(self, i: Instruction) -> Encoding:
        """cp.async, cp.async.bulk and cp.reduce.async.bulk, of tensors too."""
        if "bulk" not in i.modifiers:
            return self.small_copy(i)
        if "commit_group" in i.modifiers:
            return Encoding("bulk_commit", ())
        if "wait_group" in i.modifiers:
            return Encoding("bulk_wait", (self.slot(i.operands[0]),))
        adds = i.modifiers[0] == "reduce"
        if adds and "tensor" not in i.modifiers and ("add" not in i.modifiers or i.type not in ("f32", "s32")):
            raise NotImplementedError(i.opcode)
        shared_to = next(m for m in i.modifiers if m.startswith(("shared", "global"))).startswith("shared")
        tensor = next((int(m[0]) for m in i.modifiers if re.fullmatch(r"\dd", m)), 0)
        blocks = NONE
        if "multicast::cluster" in i.modifiers:
            blocks = self.slot(i.operands[3 if tensor else 4])
        if tensor:
            return self.tensor_copy(i, shared_to, adds, blocks)
        if shared_to:
            to, source, count, barrier = i.operands[:4]
            slots = (*self.address(to), *self.address(source), self.slot(count), *self.address(barrier), blocks)
            return Encoding("bulk_load", slots)
        to, source, count = i.operands[:3]
        slots = (*self.address(to), *self.address(source), self.slot(count))
        return Encoding("bulk_store", slots, aux=adds * (1 + (adds and i.type == "s32")))

    def tensor_copy(self, i: Instruction, shared_to: bool, adds: bool, blocks: int) -> Encoding:
        tensor = next(operand for operand in i.operands[:2] if "{" in operand)
        where, place = split(tensor.strip("[] "))
        coordinates = self.slots(place)
        if shared_to:
            to, _, barrier = i.operands[:3]
            slots = (*self.address(to), *self.address(where), *coordinates, *self.address(barrier), blocks)
            return Encoding("tensor_load", slots, aux=len(coordinates))
        slots = (*self.address(where), *coordinates, *self.address(i.operands[1]))
        return Encoding("tensor_store", slots, aux=len(coordinates) | adds << 3)

    def small_copy(self, i: Instruction) -> Encoding:
        if "mbarrier" in i.modifiers:
            if "noinc" not in i.modifiers:
                raise NotImplementedError(i.opcode)
            return Encoding("copy_arrive", self.address(i.operands[0]))
        if "wait_all" in i.modifiers:
            return Encoding("copy_wait_all", ())
        if "commit_group" in i.modifiers:
            return Encoding("copy_commit", ())
        if "wait_group" in i.modifiers:
            return Encoding("copy_wait", (self.slot(i.operands[0]),))
        if not {"ca", "cg"} & {*i.modifiers}:
            raise NotImplementedError(i.opcode)
        to, source, count, *used = i.operands
        slots = (*self.address(to), *self.address(source), self.slot(count), self.slot(used[0]) if used else NONE)
        return Encoding("copy_later", slots)

    def product(self, i: Instruction) -> Encoding:
        if i.modifiers[0] == "commit_group":
            return Encoding("wgmma.commit", (), Kind.CONVERGE)
        if i.modifiers[0] == "wait_group":
            return Encoding("wgmma.wait", (self.slot(i.operands[0]),), Kind.CONVERGE)
        shape = next(m for m in i.modifiers if re.fullmatch(r"m64n\d+k\d+", m))
        columns, depth = (int(number) for number in re.findall(r"[nk](\d+)", shape))
        accumulator, (*types,) = i.modifiers[-3], i.modifiers[-2:]
        if accumulator != "f32" or types[0] != types[1]:
            raise NotImplementedError(i.opcode)
        d, a, b, adds, *rest = i.operands
        in_registers = a.startswith("{")
        if rest[:2] != ["1", "1"]:
            raise NotImplementedError(f"{i.opcode} that negates")
        transposed = [int(bit) for bit in rest[2:]]
        transpose_a, transpose_b = (0, *transposed) if len(transposed) == 1 else (transposed or (0, 0))
        form = ("bf16", "f16", "e4m3").index(types[0])
        aux = columns | depth << 10 | form << 20 | in_registers << 24 | transpose_a << 25 | transpose_b << 26
        slots = (*self.slots(d), *self.slots(a), self.slot(b), self.slot(adds))
        return Encoding("wgmma", slots, Kind.CONVERGE, aux=aux)

    def small_product(self, i: Instruction) -> Encoding:
        """mma.sync.aligned.m16n8k16 of 16-bit numbers, summed in f32."""
        if i.modifiers[2:5] != ("m16n8k16", "row", "col") or i.modifiers[-4] != "f32" or i.modifiers[-1] != "f32":
            raise NotImplementedError(i.opcode)
        slots = [slot for operand in i.operands for slot in self.slots(operand)]
        return Encoding("mma", slots, Kind.CONVERGE, aux=("bf16", "f16").index(i.modifiers[-2]))


_SPECIAL_FORMS: dict[str, Callable[[_Encoder, Instruction], Encoding]] = {
    "mov": _Encoder.move,
    "selp": lambda self, i: Encoding("selp", [self.slot(operand) for operand in i.operands]),
    "cvt": _Encoder.conversion,
    "cvta": _Encoder.address_space,
    "mapa": lambda self, i: Encoding("mapa", [self.slot(operand) for operand in i.operands]),
    "ld": _Encoder.memory,
    "st": _Encoder.memory,
    "atom": _Encoder.atomic,
    "red": _Encoder.atomic,
    "shfl": _Encoder.exchange,
    "vote": _Encoder.ballot,
    "redux": _Encoder.reduction,
    "elect": _Encoder.election,
    "ldmatrix": _Encoder.matrix,
    "stmatrix": _Encoder.matrix,
    "bar": _Encoder.barrier,
    "barrier": _Encoder.barrier,
    "mbarrier": _Encoder.mbarrier,
    "fence": _Encoder.fence,
    "cp": _Encoder.copy,
    "wgmma": _Encoder.product,
    "mma": _Encoder.small_product,
    "griddepcontrol": lambda self, i: Encoding(i.opcode, (), Kind.CONVERGE),
    "nanosleep": lambda self, i: Encoding("sleep", ()),
}
