"""Compiles the objects of test_prefill_gpu.py into the cache folder given, 10 at a time."""
import os, sys, concurrent.futures
os.environ["TSMLA_CACHE_DIR"] = sys.argv[1]
from tsmla_kernels import cache
from tsmla_kernels.catalog import MLA_PREFILL
from tsmla_kernels.sm90.choose_prefill import PrefillConfig
def one(a):
    d, c, k, v, r = a
    cache.load_or_compile(MLA_PREFILL, PrefillConfig(dtype=d, causal=c, qk_head_dim=k, v_head_dim=v, rope_dim=r, groups=3 if d.startswith("float8") else 2), "sm_90a")
jobs = [("float8_e4m3fn", c, 192, 128, 0) for c in (True, False)] + [("bfloat16", c, 192, 128, r) for c in (True, False) for r in (0, 64)]
jobs += [(d, True, k, v, 0) for d in ("bfloat16", "float16") for k, v in ((192, 128), (128, 128), (64, 64))]
if __name__ == "__main__":
    with concurrent.futures.ProcessPoolExecutor(12) as ex: list(ex.map(one, dict.fromkeys(jobs)))
