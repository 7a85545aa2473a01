"""Patches of the candidate, written beside it."""
F, G = "sm90/mla_decode_fp8.py", "sm90/mla_decode.py"
def w(name, **patch):
    open(f"{name}.py", "w").write("BASE = 'cand'\nPATCH = " + repr({k.replace("_fp8", "/mla_decode_fp8").replace("_16", "/mla_decode") + ".py": v for k, v in patch.items()}))
# P V over all 64 rows, as the kernel in the tree has it
w("rows64", sm90_fp8=[("self.p_rows = next(n for n in (16, 32, 64) if n >= min(rows, ROWS))", "self.p_rows = ROWS")])
w("e2", sm90_fp8=[("EARLY_STEPS = 4", "EARLY_STEPS = 2")])
w("e8", sm90_fp8=[("EARLY_STEPS = 4", "EARLY_STEPS = 8")])
w("b4", sm90_16=[("EARLY_STEPS = 8", "EARLY_STEPS = 4")])
w("b12", sm90_16=[("EARLY_STEPS = 8", "EARLY_STEPS = 12")])
w("b16", sm90_16=[("EARLY_STEPS = 8", "EARLY_STEPS = 16")])
# the search for the maximum before the exponentials, as in the tree: what kept addresses alone give
w("nospec", sm90_16=[("self.speculate = self.rescale_bits > 0.0", "self.speculate = False")], sm90_fp8=[("self.speculate = True", "self.speculate = False")])
# speculation where S * H <= 64 too, and a maximum that lags there
w("lag1", sm90_16=[("self.rescale_bits = 0.0 if config.cluster == 1 else RESCALE_BITS", "self.rescale_bits = RESCALE_BITS")])
# combine allowed to begin by the values alone, after their stores; and a combine of 512 threads
w("trigv", sm90_16=[("        cute.arch.griddepcontrol_launch_dependents()\n        self.end()\n", "        if group > 0:\n            cute.arch.griddepcontrol_launch_dependents()\n        self.end()\n")])
open("ct512.py", "w").write("BASE = 'early'\nPATCH = " + repr({"sm90/decode_combine.py": [("COMBINE_THREADS = 1024", "COMBINE_THREADS = 512"), ("COMBINE_GROUP = 512", "COMBINE_GROUP = 256")]}))
# each lane that writes a factor arrives: what compute-sanitizer's racecheck can follow
open("race.py", "w").write("BASE = 'early'\nPATCH = " + repr({"sm90/decode_ring.py": [("        if lane == 0:\n            cute.arch.mbarrier_arrive(ready + index)\n", "        if lane % 4 == 0:\n            cute.arch.mbarrier_arrive(ready + index)\n")], "sm90/decode_kernel.py": [("mbarrier_init(ready + i, 4)", "mbarrier_init(ready + i, 32)")], G: [("                if lane == 0:\n                    cute.arch.mbarrier_arrive(ready + index)\n", "                if lane % 4 == 0:\n                    cute.arch.mbarrier_arrive(ready + index)\n")], F: [("                if lane == 0:\n                    cute.arch.mbarrier_arrive(ready + index)\n", "                if lane % 4 == 0:\n                    cute.arch.mbarrier_arrive(ready + index)\n")]}))
w("nospec8", sm90_fp8=[("self.speculate = True", "self.speculate = False"), ("self.registers = (104, 192, 24)", "self.registers = (120, 184, 24)")])


def traced(name, base, file, score, values):
    """clock() of one warp of the scores (role 0, in partial_lse) and of the values (roles 1, 2, in partial_out), for the first
    40 blocks of CTA 0's first piece: only where no piece is split (33,2,128,8192; 132,1,16,8192)."""
    def event(array, role, n, who):
        return (f"if {who} and cute.arch.block_idx()[0] == 0 and piece == 0 and b - b_begin < 40:\n"
                f"    cute.make_tensor({array}.iterator + ({role} * 400 + (b - b_begin) * 8 + {n}), cute.make_layout(1))[0] = Float32(cute.arch.clock() & 0xffffff)\n")
    def put(anchor, n, array, role, who, before):
        indent = " " * (len(anchor) - len(anchor.lstrip(" ")))
        lines = "".join(indent + l + "\n" for l in event(array, role, n, who).rstrip("\n").split("\n"))
        return (anchor, lines + anchor if before else anchor + lines)
    reps = [put(a, n, "partial_lse", 0, "lane == 0 and warp_here == 0", before) for n, (a, before) in enumerate(score)]
    reps += [put(a, n, "partial_out", "(1 + (warp_idx - 4) // 5)", "lane == 0 and (warp_idx == 4 or warp_idx == 9)", before) for n, (a, before) in enumerate(values)]
    open(f"{name}.py", "w").write(("BASE = 'cand'\n" if base else "") + "PATCH = " + repr({file: reps}))


I = " " * 20
for base in (True, False):
    traced("tr16" + ("" if base else "h"), base, G, [
        (I + "warpgroup.fence()\n" + I + "mma_qk.set(Field.ACCUMULATE, False)\n", True),
        (I + "warpgroup.wait_group(1)\n", False),
        (I + "warpgroup.wait_group(0)\n" + I + "previous = index\n", True),
        (I + "# All four warps have read these keys' rope columns: P may overwrite them.\n", True),
    ], [
        (I + "if moved[row_low // 16, index] != 0:\n", True),
        (I + "# While that runs: fill the stage that was left before.\n", True),
        (I + "pending, phase_of_pending = index, phase\n" + I + "if b + 1 == b_end:\n", True),
    ])
traced("tr8", True, F, [
    (I + "warpgroup.fence()\n" + I + "mma_qk.set(Field.ACCUMULATE, False)\n", True),
    (I + "warpgroup.wait_group(1)\n", False),
    (I + "warpgroup.wait_group(0)\n" + I + "previous = index\n", True),
    (I + "r_p.store(probabilities.load().to(self.p_dtype))\n", True),
], [
    (I + "# While the scores are found.\n", True),
    (I + "self.rescale_out(o, rescale, moved, index, lane)\n", True),
    (I + "warpgroup.wait_group(0)\n" + I + "self.leave(index, empty)\n", True),
    (I + "self.leave(index, empty)\n" + I + "index, phase = self.advance(index, phase)\n" + " " * 16 + "self.store(\n", True),
])
