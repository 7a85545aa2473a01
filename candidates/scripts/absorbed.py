"""512 new tokens over 65536 of paged context, 128 heads: expanded by chunks against absorbed (mla_decode with S = 512)."""
import concurrent.futures, os, sys, json
sys.path[:0] = ["benchmarks"]
os.environ["TSMLA_CACHE_DIR"] = "/tmp/absorbed_cache"
H, C, PAGE = 128, 65536, 64
from tsmla_kernels.catalog import MLA_PREFILL, GATHER_KV_CACHE, MERGE_ATTENTION_STATES, MLA_DECODE, mla_decode_config
from tsmla_kernels.sm90.choose_prefill import PrefillConfig, prefill_workspaces
KV = PrefillConfig(dtype="bfloat16", causal=False, rope_dim=64)
def decode_config(s):
    return mla_decode_config({"num_heads": str(H), "max_q_len": str(s), "causal": "false"})
JOBS = [(MLA_PREFILL, KV), (GATHER_KV_CACHE, GATHER_KV_CACHE.config("bfloat16", "bfloat16")), (MERGE_ATTENTION_STATES, MERGE_ATTENTION_STATES.config("bfloat16", 128))] + [(MLA_DECODE, decode_config(s)) for s in (512, 128)]
def comp(i):
    from tsmla_kernels import cache
    cache.load_or_compile(*JOBS[i], "sm_90a")
def main():
    with concurrent.futures.ProcessPoolExecutor(5) as ex: list(ex.map(comp, range(len(JOBS))))
    import torch, tsmla_bridge
    from timing import time_all
    from tsmla_kernels.launch import ArrayView, Launcher
    t = torch; t.manual_seed(0); bf = t.bfloat16
    sms = t.cuda.get_device_properties(0).multi_processor_count
    view = lambda x: ArrayView(x.data_ptr(), tuple(x.shape), str(x.dtype).removeprefix("torch."))
    prefill = Launcher(MLA_PREFILL, KV, "sm_90a")
    cache = t.randn(C // PAGE, PAGE, 576, device="cuda", dtype=bf) / 2
    tables = t.randperm(C // PAGE, device="cuda").to(t.int32)[None].contiguous()
    lens = t.tensor([C], dtype=t.int32, device="cuda")
    w = t.randn(512, H * 256, device="cuda", dtype=bf) / 16          # [nope | v] a head
    w_uk, w_uv = (x.contiguous() for x in w.view(512, H, 256).permute(1, 0, 2).split(128, 2))  # [H, 512, 128]
    scale = 192 ** -0.5
    res = {}
    for S in (512, 128):
        q = t.randn(S, H, 192, device="cuda", dtype=bf)
        cu_q = t.tensor([0, S], dtype=t.int32, device="cuda"); scales = t.tensor([scale, 1.0], device="cuda")
        def expanded(chunk, parts=False):
            cu_kv = t.tensor([0, chunk], dtype=t.int32, device="cuda"); n = t.tensor([chunk], dtype=t.int32, device="cuda")
            starts = [t.tensor([i], dtype=t.int32, device="cuda") for i in range(0, C, chunk)]
            ws = [t.empty(sh, dtype=getattr(t, d), device="cuda") for sh, d in prefill_workspaces(1, sms).values()]
            def gather(i): return tsmla_bridge.gather_kv_cache(cache, tables, starts[i], n, total_len=chunk)
            def expand(rows): return (rows[:, :512] @ w).view(chunk, H, 256), rows[:, 512:].contiguous()
            def attend(kv, rope):
                out, lse = t.empty(S, H, 128, device="cuda", dtype=bf), t.empty(S, H, device="cuda")
                prefill(t.cuda.current_stream().cuda_stream, [view(x) for x in (q, kv, rope, cu_q, cu_kv, scales, out, lse, *ws)])
                return out, lse
            def run():
                total = None
                for i in range(len(starts)):
                    part = attend(*expand(gather(i)))
                    total = part if total is None else tsmla_bridge.merge_attention_states([total[0], part[0]], [total[1], part[1]])
                return total
            if parts:
                rows = gather(0); kv, rope = expand(rows)
                return {"gather": lambda: gather(0), "expand": lambda: expand(rows), "attend": lambda: attend(kv, rope)}
            return run
        def absorbed():
            qa = t.empty(S, H, 576, device="cuda", dtype=bf)
            qa[..., :512] = t.bmm(q[..., :128].transpose(0, 1), w_uk.transpose(1, 2)).transpose(0, 1)
            qa[..., 512:] = q[..., 128:]
            o, lse = tsmla_bridge.mla_decode(qa[None], cache, tables, lens, softmax_scale=scale, causal=False, return_lse=True, implementation="cute")
            return t.bmm(o[0].transpose(0, 1), w_uv).transpose(0, 1), lse[0]
        functions = {f"expanded, chunks of {c}": expanded(c) for c in (8192, 65536)} | {"absorbed": absorbed}
        got = {n: f() for n, f in functions.items()}; t.cuda.synchronize()
        a = got["absorbed"]
        for n, (o, l) in got.items():
            print(S, n, "rel to absorbed %.4f lse %.1e" % (float((o.float() - a[0].float()).norm() / a[0].float().norm()), float((l - a[1]).abs().max())))
        del got, a
        times = time_all(functions, 9)
        times |= {f"of {c}: {n}": us for c in (8192, 65536) for n, us in time_all(expanded(c, True), 9).items()}
        res[S] = times
        print(S, {n: round(us) for n, us in times.items()}, flush=True)
        t.cuda.empty_cache()
    json.dump(res, open(os.environ.get("OUT", "/tmp") + "/absorbed.json", "w"), indent=0)
if __name__ == "__main__": main()
