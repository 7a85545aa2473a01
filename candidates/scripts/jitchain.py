"""What one mla_decode costs in a jitted chain above its kernels: chains of n and 3 n, with and without it, per call."""
import time, sys, functools, torch, jax, jax.numpy as jnp, tsmla_jax
sys.path.insert(0,".gpu"); sys.path.insert(0,"benchmarks")
def chain_of(n, scale, with_it, loop):
    def step(q, cache, table, lens):
        if with_it:
            out=tsmla_jax.mla_decode(q, cache, table, lens, softmax_scale=scale, implementation="cute")
        else: out=q[..., :512]*0.5
        return q.at[..., :512].set(out)
    @jax.jit
    def f(q, cache, table, lens):
        if loop: return jax.lax.fori_loop(0,n,lambda _,x: step(x,cache,table,lens),q)
        for _ in range(n): q=step(q,cache,table,lens)
        return q
    return f
def best(f,*a):
    f(*a).block_until_ready(); ts=[]
    for _ in range(7):
        t=time.perf_counter(); f(*a).block_until_ready(); ts.append(time.perf_counter()-t)
    return min(ts)*1e6
for b,s,h,keys in ((1,1,16,4096),(16,1,16,8192),(64,1,16,8192),(16,1,128,8192),(64,1,128,8192)):
    P=b*keys//64
    cache=jax.random.normal(jax.random.key(0),(P,64,576),jnp.bfloat16); table=jnp.arange(P,dtype=jnp.int32).reshape(b,-1); lens=jnp.full((b,),keys,jnp.int32)
    q=jax.random.normal(jax.random.key(1),(b,s,h,576),jnp.bfloat16); sc=192**-.5; r={}
    for loop in (0,1):
        for w in (0,1):
            a,c=(best(chain_of(n,sc,w,loop),q,cache,table,lens) for n in (12,36))
            r[loop,w]=(c-a)/24
    # kernels alone: a torch CUDA graph of the same calls, without a flush
    import tsmla_bridge
    t=[torch.from_dlpack(x) for x in (q,cache,table,lens)]; out=torch.empty(b,s,h,512,dtype=torch.bfloat16,device="cuda")
    one=lambda: tsmla_bridge.mla_decode(*t,softmax_scale=sc,out=out)
    one(); torch.cuda.synchronize(); g={}
    for n in (12,36):
        G=torch.cuda.CUDAGraph()
        with torch.cuda.graph(G):
            for _ in range(n): one()
        ts=[]
        for _ in range(7):
            x,y=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True); x.record(); G.replay(); y.record(); y.synchronize(); ts.append(x.elapsed_time(y)*1e3)
        g[n]=min(ts)
    k=(g[36]-g[12])/24
    print((b,s,h,keys),"kernels %.1f us; unrolled %.1f without it %.1f: dispatch %.1f; loop %.1f without %.1f: dispatch %.1f"%(k,r[0,1],r[0,0],r[0,1]-r[0,0]-k,r[1,1],r[1,0],r[1,1]-r[1,0]-k),flush=True)
