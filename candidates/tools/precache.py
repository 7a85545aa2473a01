"""objects into .gpu/objs (TSMLA_CACHE_DIR): small grid and stress of decode"""
import os,sys,itertools,concurrent.futures
os.environ["TSMLA_CACHE_DIR"]="/work/main/.gpu/objs"
def one(o):
    from tsmla_kernels import cache
    from tsmla_kernels.catalog import MLA_DECODE, mla_decode_config
    cache.load_or_compile(MLA_DECODE, mla_decode_config(o), "sm_90a"); return 1
if __name__=="__main__":
    K=[("bfloat16","bfloat16"),("float16","float16"),("float8_e4m3fn","float8_e4m3fn"),("bfloat16","float8_e4m3fn")]
    L=[]
    if "fp8" in sys.argv: K=[K[2]]
    for d,kv in K:
        if "grid" in sys.argv:
            for h,q in ((16,1),(16,4),(128,1),(9,2)):
                for inv in ("false","true"): L.append(dict(num_heads=str(h),max_q_len=str(q),dtype=d,kv_dtype=kv,batch_invariant=inv))
        if "stress" in sys.argv and d!="float16":
            for h,q in ((16,1),(16,2),(16,4),(128,1)): L.append(dict(num_heads=str(h),max_q_len=str(q),dtype=d,kv_dtype=kv))
    with concurrent.futures.ProcessPoolExecutor(2) as ex: print(sum(ex.map(one,L)),"objects")
