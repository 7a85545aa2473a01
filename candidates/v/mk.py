"""Patches, written beside this."""
G, F = "sm90/mla_decode.py", "sm90/mla_decode_fp8.py"
def w(name, base=None, **p):
    open(f"{name}.py", "w").write((f"BASE = {base!r}\n" if base else "") + "PATCH = " + repr({{"g": G, "f": F}[k]: v for k, v in p.items()}) + "\n")
S = "                        self.store_matrices((address_here + p_offset) ^ (i << 5), *four)\n"
def trigger(t):
    return (S, S + f"                    if b == b_end - {t}:\n                        next_at = (piece + 1) % self.descriptors\n                        if descriptor[0, next_at] == descriptor[1, next_at]:\n                            cute.arch.griddepcontrol_launch_dependents()\n")
# combine's launch allowed some blocks before the end of a CTA's last piece, so that its latency passes beside them
for t in (1, 3, 8): w(f"trig{t}", g=[trigger(t)], f=[trigger(t)])
# fp8: how long before the end of Q K^T the values are let loose (32 cycles a step)
for n in (4, 5, 6): w(f"q{n}", f=[("EARLY_STEPS = 3 ", f"EARLY_STEPS = {n} ")]); w(f"rq{n}", "rs8", f=[("EARLY_STEPS = 3 ", f"EARLY_STEPS = {n} ")])
w("rsahead8", "rs8", f=[("AHEAD = 4 ", "AHEAD = 8 ")])
w("rsf2", "rs8", f=[("FRAGMENTS = 1 ", "FRAGMENTS = 2 ")])
# what S * H <= 32 rows take: f16 and 1,024 threads for more than 16
open("few16.py", "w").write("PATCH = {'sm90/choose.py': [('FEW_ROWS = 32', 'FEW_ROWS = 16')]}\n")
# bf16: the maximum that lags where S * H <= 64 too
w("lag1", g=[("self.rescale_bits = 0.0 if config.cluster == 1 else RESCALE_BITS", "self.rescale_bits = RESCALE_BITS")])

# the shorter combine, with these
for t in (1, 3, 8): w(f"ctrig{t}", "comb", g=[trigger(t)], f=[trigger(t)])
for n in (4, 5): w(f"crq{n}", "combrs", f=[("EARLY_STEPS = 3 ", f"EARLY_STEPS = {n} ")])
