"""Device functions that the Hopper kernels share: arithmetic, addresses, exchanges in a warp."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.constants import FP8

DTYPES = {
    "float32": cutlass.Float32,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    FP8: cutlass.Float8E4M3FN,
}


def quotient(value: Int32, divisor: int) -> Int32:
    """value // divisor, for a power of 2, by a shift, which also rounds down. The compiler does not know the value's
    sign and would take six instructions."""
    return value >> _exponent(divisor)


def remainder(value: Int32, divisor: int) -> Int32:
    """value % divisor, for a power of 2."""
    return value & ((1 << _exponent(divisor)) - 1)


def _exponent(divisor: int) -> int:
    if divisor < 1 or divisor & (divisor - 1):
        raise ValueError(f"divisor is {divisor}; legal: a power of 2, else by divide")
    return divisor.bit_length() - 1


@cute.jit
def divide(a: Int32, b: Int32):
    """a // b for a >= 0 and b > 0, in a quarter of the instructions that the compiler would take."""
    inverse = cute.arch.rcp_approx(Float32(b))
    q = Int32(Float32(a) * inverse)
    q += Int32(Float32(a - q * b) * inverse)
    rest = a - q * b
    if rest < 0:
        q -= 1
    if rest >= b:
        q += 1
    return q


@cute.jit
def prefetch(array: cute.Tensor, offset: Int32):
    """Prefetch 128 bytes from element `offset` on into the L2 cache, if the array has this element."""
    if Int64(offset) < Int64(array.shape[0]) * array.shape[1]:
        cute.arch.prefetch((array.iterator + offset).to_llvm_ptr(), cache_level="L2")


def element(tensor: cute.Tensor, offset: Int32, align: int) -> cute.Pointer:
    """The address of element `offset` of a dense `tensor` in global memory.

    Unchecked: the caller guarantees the alignment. `Pointer.align` would round at run time (three instructions).
    """
    dtype = tensor.element_type
    address = tensor.iterator.toint() + Int64(offset) * (dtype.width // 8)
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


@cute.jit
def uniform(value: Int32):
    """Move a value that all lanes hold to a uniform register: code that depends on it alone runs once per warp."""
    return cute.arch.warp_redux_sync(value, "max")


@cute.jit
def kept(value: Int32):
    """Pass a value through a shuffle, which hides from the compiler how it was computed.

    So the compiler keeps the value in a register. Otherwise it may compute the value again at every use.
    """
    return cute.arch.shuffle_sync_bfly(value, offset=0)


@cute.jit
def running_sum(value: Int32, lane: Int32):
    """The sum of the values of this lane and of all lanes before it."""
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, offset=1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            value += other
    return value


@cute.jit
def sum_before(value: Int32, index: Int32, lane: Int32):
    """The sum of the values of the lanes before lane `index`."""
    if lane >= index:
        value = Int32(0)
    return cute.arch.warp_redux_sync(value, "add")


@cute.jit
def advance(index: Int32, phase: Int32, stages: cutlass.Constexpr[int]):
    """The stage after `index`, and the parity of its barriers."""
    index += 1
    if index == stages:
        index = Int32(0)
        phase ^= 1
    return index, phase


@cute.jit
def release(barrier: cute.Pointer) -> None:
    """Arrive on `barrier` once for the calling warp, which has finished reading a buffer or writing its part of one."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def load_transposed(address: Int32):
    """Load four 8 x 8 matrices of 16-bit words, transposed. A lane gives the address of one of their rows."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def load_matrices(address: Int32):
    """Load four 8 x 8 matrices of 16-bit words. A lane gives the address of one of their rows."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def store_transposed(address: Int32, a: Int32, b: Int32, c: Int32, d: Int32):
    """Store four 8 x 8 matrices of 16-bit words, transposed. A lane gives the address of one row of the result."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, a, b, c, d],
    )


def store_matrices(address: Int32, a: Int32, b: Int32, c: Int32, d: Int32):
    """Store four 8 x 8 matrices of 16-bit words. A lane gives the address of one of their rows."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, a, b, c, d],
    )


@cute.jit
def transpose_quad(words: cute.Tensor, quad: Int32, distance: cutlass.Constexpr[int] = 1):
    """4 x 4 transpose among four lanes, of which each is `distance` from the next, such as those of a row: word j of
    lane q becomes word q of lane j."""
    for step in cutlass.range_constexpr(2):
        offset = 2 >> step
        upper = (quad // offset) % 2
        for j in cutlass.range_constexpr(4):
            if const_expr((j // offset) % 2 == 0):
                a, b = words[j], words[j + offset]
                sent = b
                if upper == 1:
                    sent = a
                received = cute.arch.shuffle_sync_bfly(sent, offset=offset * distance)
                if upper == 1:
                    a = received
                else:
                    b = received
                words[j], words[j + offset] = a, b


def global_tensor(tensor: cute.Tensor, offset: Int64, count: int) -> cute.Tensor:
    """`count` elements of a dense tensor in global memory, from element `offset` on. The address of the first must be a
    multiple of 16."""
    address = tensor.iterator.toint() + offset * (tensor.element_type.width // 8)
    pointer = cute.make_ptr(tensor.element_type, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(count))


def rounds(count: Int64, first: Int64, step: Int64) -> Int32:
    """How many of `count` elements a thread has: element `first` (below `step`) and every `step`-th one after it."""
    return Int32((count - first + (step - 1)) // step)
