"""Cycles of one SMSP's warp instructions: e4m3 -> f16 conversion, MUFU, and both, by 1 or 2 or 3 warps a SMSP."""
import sys, torch
import cutlass, cutlass.cute as cute
from cutlass import Int32, Float32, const_expr
from cutlass.cute.runtime import from_dlpack

def cvt(w):
    return cute.arch.inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, lo; cvt.rn.f16x2.e4m3x2 {$w1}, hi; }",
        write_only_types=[Int32] * 2, read_only_args=[w])

N = 64
class K:
    def __init__(self, modes, warps): self.modes, self.warps = modes, warps
    @cute.jit
    def __call__(self, out: cute.Tensor):
        self.k(out).launch(grid=[1, 1, 1], block=[self.warps * 32, 1, 1])
    @cute.jit
    def loop(self, mode: cutlass.Constexpr[str], x: cute.Tensor, f: cute.Tensor):
        for i in cutlass.range(N, unroll=1):
            for j in cutlass.range_constexpr(8):
                if const_expr(mode == "cvt"):
                    a, b = cvt(x[j]); x[j] = a ^ b
                if const_expr(mode == "alu"):
                    w = x[j]
                    a = ((w & 0x7f007f00) >> 1) | (w & Int32(-0x7fff8000))
                    b = ((w & 0x007f007f) << 7) | ((w & 0x00800080) << 8)
                    x[j] = a ^ b
                if const_expr(mode == "xor"):
                    x[j] = (x[j] ^ x[(j + 1) % 8]) + 1
                if const_expr(mode == "prmt"):
                    x[j] = Int32(cute.arch.prmt(x[j], x[j], 0x3120)) ^ x[(j + 1) % 8]
                if const_expr(mode == "ex2"):
                    f[j] = cute.math.exp2(f[j], fastmath=True)
                if const_expr(mode == "ex2two"):
                    f[j] = cute.math.exp2(f[j] * 0.5 - 0.1, fastmath=True)
                if const_expr(mode == "fmax"):
                    f[j] = cute.arch.fmax(f[j], f[(j + 1) % 8]) * 0.5
    @cute.kernel
    def k(self, out: cute.Tensor):
        t, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        x = cute.make_rmem_tensor((8,), Int32); f = cute.make_rmem_tensor((8,), Float32)
        for j in cutlass.range_constexpr(8):
            x[j] = t * 7919 + j * 104729; f[j] = Float32(t + j) * 0.001
        cute.arch.sync_threads()
        start = Int32(cute.arch.clock())
        for w in cutlass.range_constexpr(len(self.modes)):
            if warp // 4 == w:
                self.loop(self.modes[w], x, f)
        cute.arch.sync_warp()
        end = Int32(cute.arch.clock())
        s = Int32(0)
        for j in cutlass.range_constexpr(8):
            s = s ^ x[j] ^ f[j].bitcast(Int32)
        out[t] = s
        if t % 32 == 0: out[1024 + t // 32] = end - start

for modes in (["xor"], ["cvt"], ["cvt", "cvt"], ["alu"], ["alu", "alu"], ["prmt"], ["ex2"], ["ex2two"], ["ex2", "ex2"], ["cvt", "ex2"], ["cvt", "cvt", "ex2"], ["alu", "ex2"], ["alu", "alu", "ex2"], ["cvt", "alu"], ["cvt", "alu", "ex2"], ["fmax"]):
    out = torch.zeros(1200, dtype=torch.int32, device="cuda")
    k = K(modes, 4 * len(modes)); d = from_dlpack(out)
    c = cute.compile(k, d)
    for _ in range(2): c(d)
    torch.cuda.synchronize()
    r = out[1024:1024 + 4 * len(modes)].tolist()
    print(modes, "cycles an item (8 bytes of 4 e4m3 -> 2 words, or one ex2):", [round(max(r[4 * w: 4 * w + 4]) / (N * 8), 2) for w in range(len(modes))], flush=True)
