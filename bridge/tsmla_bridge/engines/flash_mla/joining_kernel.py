"""The Triton kernel of joining.py. It has its own module so that joining.py can be imported without Triton."""

import triton
import triton.language as tl

# Sizes and addresses that differ from call to call must not each compile a kernel.
_SIZES = ["near_stride", "far_stride", "per_request", "window", "count", "width"]
_TENSORS = ["near", "near_lengths", "far", "far_lengths", "out", "out_lengths"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TENSORS)
def join(
    near, near_lengths, far, far_lengths, out, out_lengths, near_stride, far_stride, per_request, window, count, width,
    HAS_NEAR: tl.constexpr, HAS_FAR: tl.constexpr, BLOCK: tl.constexpr, SIGNALS: tl.constexpr,
):  # fmt: skip
    """Write BLOCK columns of a token's row in `out`; with HAS_FAR a token's first program also writes its length.
    SIGNALS: whether the next kernel may begin at once; that kernel waits for this one before it reads."""
    if SIGNALS:
        tl.extra.cuda.gdc_launch_dependents()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    behind = columns - window
    # Columns are loaded without regard to lengths, so that no load waits for its row's length.
    a = tl.load(near + token * near_stride + columns, mask=columns < window, other=-1)
    b = tl.load(far + token * far_stride + behind, mask=(behind >= 0) & (behind < count), other=-1)
    if HAS_FAR:
        length = tl.load(far_lengths + token // per_request) + window
    if HAS_NEAR:
        a = tl.where(columns < tl.load(near_lengths + token // per_request), a, -1)
    tl.store(out + token * width + columns, tl.where(columns < window, a, b), mask=columns < width)
    if HAS_FAR:
        tl.store(out_lengths + token, length, mask=part == 0)
