"""dev.py check|bench --v a,b --points b,s,h,keys/... --modes q8,bf16,kv8 [--peers] [--varlen 0,1] [--iters N]"""
import argparse, concurrent.futures, importlib, itertools, json, math, multiprocessing, os, pickle, shutil, subprocess, sys, time
# Variants: a folder of files laid over sm90/, or NAME.py with PATCH={"sm90/FILE": [(old, new), ...]} and, if it is a
# patch of a folder, BASE="FOLDER".
ROOT=os.getcwd(); V=f"{ROOT}/.gpu/v"; TMP="/tmp/var"
MODES={"bf16":("bfloat16","bfloat16"),"q8":("float8_e4m3fn",)*2,"kv8":("bfloat16","float8_e4m3fn"),"f16":("float16","float16"),"kv8h":("float16","float8_e4m3fn")}
def make(v):
    d=f"{TMP}/{v}"
    shutil.rmtree(d,ignore_errors=True); shutil.copytree(f"{ROOT}/kernels/tsmla_kernels",f"{d}/tsmla_kernels")
    def lay(name):
        for f in os.listdir(f"{V}/{name}"): shutil.copy(f"{V}/{name}/{f}",f"{d}/tsmla_kernels/sm90/{f}")
    if v!="head" and os.path.isdir(f"{V}/{v}"): lay(v)
    elif v!="head":
        ns={}; exec(open(f"{V}/{v}.py").read(),ns)
        if "BASE" in ns: lay(ns["BASE"])
        for f,reps in ns["PATCH"].items():
            p=f"{d}/tsmla_kernels/{f}"; s=open(p).read()
            for a,b in reps:
                assert a in s,(v,f,a); s=s.replace(a,b)
            open(p,"w").write(s)
    if os.path.exists(".gpu/pre/pre.tar.xz") and os.environ.get("PRE") and not os.environ.get("MAKEPRE"): subprocess.run(f"mkdir -p /tmp/prex; tar -C /tmp/prex -xJf .gpu/pre/pre.tar.xz; cp /tmp/prex/{v}/*.pkl {d}/ 2>/dev/null",shell=True)
    return d
WORK='''
import sys,pickle,os
from tsmla_kernels.catalog import MLA_DECODE, mla_decode_config
from tsmla_kernels.compile import compile_kernel
from tsmla_kernels.resources import resource_report
opts=eval(sys.argv[1]); c=compile_kernel(MLA_DECODE, mla_decode_config(opts),"sm_90a")
r=resource_report(c); bad=[(k.name[15:40],k.stack_bytes) for k in r.kernels if k.stack_bytes]
if bad or r.serialised: print("SPILL/SERIAL",sys.argv[2],opts,bad,[x[:120] for x in r.serialised])
pickle.dump(c,open(sys.argv[2],"wb"))
'''
def key(o): return "_".join(f"{k}-{v}" for k,v in sorted(o.items()))
def compile_one(a):
    v,o=a; d=f"{TMP}/{v}"; out=f"{d}/{key(o)}.pkl"
    if os.path.exists(out): return
    env=dict(os.environ,PYTHONPATH=f"{d}:"+os.environ["PYTHONPATH"].replace(f"{ROOT}/kernels",d))
    r=subprocess.run([sys.executable,"-c",WORK,repr(o),out],env=env,capture_output=True,text=True)
    return (r.stdout+r.stderr[-1500:] if r.returncode or r.stdout else None)
def compile_all(vs,opts):
    with concurrent.futures.ThreadPoolExecutor(min(16,os.cpu_count())) as ex:
        for r in ex.map(compile_one,[(v,o) for v in vs for o in opts]):
            if r: print(r,flush=True)
def choose_of(v):
    import importlib.util as iu
    n="choose_"+v
    if n not in sys.modules:
        sp=iu.spec_from_file_location(n,f"{TMP}/{v}/tsmla_kernels/sm90/choose.py"); sys.modules[n]=iu.module_from_spec(sp); sp.loader.exec_module(sys.modules[n])
    return sys.modules[n]
def launcher(v,o):
    from tsmla_kernels import cache
    from tsmla_kernels.catalog import MLA_DECODE, mla_decode_config
    import tsmla_kernels.launch as L
    p=f"{TMP}/{v}/{key(o)}.pkl"
    if not os.path.exists(p): return None
    obj=pickle.load(open(p,"rb")); old=cache.load_or_compile
    cache.load_or_compile=lambda *a,**k: obj
    import tsmla_kernels.catalog as cat; wold=cat.sm90; cat.sm90=choose_of(v)
    try: return L.Launcher(MLA_DECODE, mla_decode_config(o),"sm_90a")
    finally: cache.load_or_compile=old; cat.sm90=wold
def opts(s,h,mode,page=64,ragged=False,inv=False,causal=True,L=512,R=64):
    q,kv=MODES[mode]; return {"num_heads":str(h),"max_q_len":str(s),"page_size":str(page),"dtype":q,"kv_dtype":kv,"ragged":str(ragged).lower(),"batch_invariant":str(inv).lower(),"causal":str(causal).lower(),"latent_dim":str(L),"rope_dim":str(R)}
class Case:
    def __init__(self,s,h,mode,lens,page=64,ragged=None,inv=False,causal=True,L=512,R=64,seed=0,std=1.0,nan=True,qstd=1.0):
        import torch
        self.o=opts(s,h,mode,page,ragged is not None,inv,causal,L,R); self.s,self.h,self.mode,self.page,self.L,self.D,self.causal=s,h,mode,page,L,L+R,causal
        g=torch.Generator(device="cuda").manual_seed(seed); self.b=len(lens); self.lens=lens
        q,kv=MODES[mode]; n8=kv.startswith("float8"); self.kvs=0.02 if n8 else 1.0; self.qs=0.03 if q.startswith("float8") else 1.0
        qd,kd=getattr(torch,q),getattr(torch,kv)
        pages_of=[-(-n//page) for n in lens]; P=sum(pages_of)+3
        c=torch.randn((P,page,self.D),device="cuda",generator=g)*std/self.kvs
        self.cache=(c.clamp(-448,448) if n8 else c).to(kd)
        W=max(max(pages_of),1)+2; self.table=torch.full((self.b,W),2**31-1,dtype=torch.int32)
        perm=torch.randperm(P,device="cpu")[:P].to(torch.int32); at=0
        self.pages=[]
        for r,c in enumerate(pages_of):
            self.table[r,:c]=perm[at:at+c]; self.pages.append(perm[at:at+c].tolist()); at+=c
            if nan and lens[r]%page: 
                x=self.cache[int(perm[at-1])]; x.view(torch.uint8 if n8 else torch.int16)[lens[r]%page:]=0x7f if n8 else 0x7fff
        if nan:
            for p_ in perm[at:].tolist(): self.cache[p_].view(torch.uint8 if n8 else torch.int16).fill_(0x7f if n8 else 0x7fff)
        self.qlens=ragged if ragged is not None else [s]*self.b
        T=sum(self.qlens); self.T=T
        qq=torch.randn((T,h,self.D),device="cuda",generator=g)*qstd/self.qs
        self.q=(qq.clamp(-448,448) if self.qs!=1 else qq).to(qd)
        cu=[0]
        for x in self.qlens: cu.append(cu[-1]+x)
        self.cu=cu; self.scale=(128+64)**-0.5/std/qstd
        self.table=self.table.cuda(); self.lens_gpu=torch.tensor(lens,dtype=torch.int32).cuda(); self.cu_gpu=torch.tensor(cu,dtype=torch.int32).cuda()
    def runner(self,v):
        import torch
        from tsmla_kernels.launch import ArrayView
        workspace_shapes=choose_of(v).workspace_shapes
        from tsmla_kernels.catalog import mla_decode_config
        la=launcher(v,self.o)
        if la is None: return None
        import tsmla_kernels.catalog as cat; wold=cat.sm90; cat.sm90=choose_of(v); cfg=mla_decode_config(self.o); cat.sm90=wold; rows=self.T*self.h
        od=torch.bfloat16 if self.o["dtype"].startswith("float8") else getattr(torch,self.o["dtype"])
        out=torch.full((rows,self.L),float("nan"),dtype=od,device="cuda"); lse=torch.full((rows,),float("nan"),device="cuda")
        sms=torch.cuda.get_device_properties(0).multi_processor_count
        ws=[torch.full(sh,-1,dtype=getattr(torch,d),device="cuda") if d=="int32" else torch.full(sh,float("nan"),dtype=getattr(torch,d),device="cuda") for sh,d in workspace_shapes(cfg,sms,self.b,self.table.shape[1]).values()]
        sc=torch.tensor([self.scale*self.qs*self.kvs,self.kvs]+[0.0]*8190,device="cuda"); run_sc=sc
        ts=[self.q.view(rows,-1),self.cache,self.table,self.lens_gpu,self.cu_gpu if self.o["ragged"]=="true" else self.lens_gpu,sc,out,lse,*ws]
        views=[ArrayView(t.data_ptr(),tuple(t.shape) if t is not run_sc else (2,),str(t.dtype).removeprefix("torch.")) for t in ts]
        def run():
            la(torch.cuda.current_stream().cuda_stream,views); return out.view(self.T,self.h,self.L),lse.view(self.T,self.h)
        run.keep=ts; return run
    def want(self,limit=None):
        import torch
        outs,lses=[],[]
        for r in range(self.b) if limit is None else limit:
            n=self.lens[r]; k=torch.cat([self.cache[p] for p in self.pages[r]])[:n].double()*self.kvs if n else torch.zeros((0,self.D),device="cuda",dtype=torch.float64)
            for t in range(self.qlens[r]):
                vis=max(0,n-(self.qlens[r]-1)+t) if self.causal else n
                q=self.q[self.cu[r]+t].double()*self.qs; sc=q@k[:vis].T*self.scale
                outs.append(torch.softmax(sc,-1)@k[:vis,:self.L] if vis else torch.zeros((self.h,self.L),device="cuda",dtype=torch.float64)); lses.append(torch.logsumexp(sc,-1) if vis else torch.full((self.h,),-math.inf,device="cuda",dtype=torch.float64))
        return torch.stack(outs),torch.stack(lses)
def check(vs,modes):
    import torch
    R=__import__("random").Random(1)
    def cases(m):
        yield dict(s=1,h=16,lens=[4096]); yield dict(s=1,h=16,lens=[1]); yield dict(s=1,h=16,lens=[0,5,64,65,200]); yield dict(s=1,h=128,lens=[700,0,33,4096,64,1])
        yield dict(s=4,h=16,lens=[9,0,4,3,130,1000,2]); yield dict(s=2,h=128,lens=[1500,3,0,77,512]); yield dict(s=1,h=64,lens=[R.randint(0,3000) for _ in range(200)])
        yield dict(s=3,h=9,lens=[R.randint(0,300) for _ in range(70)],page=16); yield dict(s=4,h=16,lens=[R.randint(0,900) for _ in range(40)],page=32,ragged=[R.randint(0,4) for _ in range(40)])
        yield dict(s=8,h=128,lens=[8192,100],page=128); yield dict(s=2,h=126,lens=[600,40,0],causal=False); yield dict(s=4,h=16,lens=[R.randint(0,6000) for _ in range(9)],inv=True,ragged=[R.randint(0,4) for _ in range(9)])
        if m=="bf16": yield dict(s=1,h=16,lens=[4096,1],std=1e6); yield dict(s=2,h=128,lens=[3000],std=1e-30); yield dict(s=2,h=128,lens=[3000,0,40],std=1e6); yield dict(s=4,h=16,lens=[3000,500],std=1000.0); yield dict(s=4,h=16,lens=[3000,500],std=3e-4); yield dict(s=1,h=64,lens=[30000],std=50.0)
        if m=="kv8": yield dict(s=2,h=128,lens=[3000,0,40],qstd=1e6); yield dict(s=4,h=16,lens=[3000,500],qstd=1e-9); yield dict(s=4,h=16,lens=[3000,500],qstd=1e30); yield dict(s=1,h=16,lens=[300,5],qstd=7000.0); yield dict(s=1,h=16,lens=[300,5],qstd=0.01)
        yield dict(s=1,h=9,lens=[400,0,33],L=256,R=0,page=16); yield dict(s=2,h=128,lens=[900,50],L=256,R=0,page=128); yield dict(s=1,h=1,lens=[20000]); yield dict(s=2,h=128,lens=[R.randint(0,4000) for _ in range(30)],inv=True)
    all_=[(m,c) for m in modes for c in cases(m)]
    def more(m):
        U=lambda n,a,b: [R.randint(a,b) for _ in range(n)]
        yield dict(s=1,h=16,lens=U(128,1000,3000)); yield dict(s=1,h=16,lens=[0,1]+U(118,700,3000)+[6000]); yield dict(s=1,h=128,lens=U(128,600,1800)); yield dict(s=1,h=128,lens=U(60,2000,4000))
        yield dict(s=2,h=128,lens=U(100,400,1500)); yield dict(s=2,h=128,lens=U(20,2000,6000)+[0]); yield dict(s=4,h=128,lens=U(7,1000,4000)); yield dict(s=4,h=128,lens=U(12,2000,4000)); yield dict(s=4,h=128,lens=U(50,300,900)+[0])
        yield dict(s=1,h=16,lens=U(16,4000,12000)); yield dict(s=4,h=16,lens=U(5,100,900)); yield dict(s=2,h=128,lens=[2000+7*i for i in range(9)]); yield dict(s=1,h=128,lens=[3000-i for i in range(40)]); yield dict(s=4,h=128,lens=U(40,6000,20000)+[0])
        yield dict(s=4,h=16,lens=U(20,100,3000),ragged=[R.randint(0,4) for _ in range(20)]); yield dict(s=8,h=64,lens=U(40,100,3000),ragged=[R.randint(0,8) for _ in range(40)])
        yield dict(s=5,h=128,lens=U(9,200,3000)); yield dict(s=10,h=128,lens=U(9,200,2000)); yield dict(s=8,h=128,lens=U(100,200,700)); yield dict(s=2,h=128,lens=[4096]*66); yield dict(s=4,h=16,lens=U(90,1500,4500))
    if os.environ.get("MORE"): all_=[(m,c) for m in modes for c in more(m)]+(all_ if os.environ["MORE"]=="2" else [])
    if os.environ.get("INV"): all_=[(m,c) for m,c in all_ if c.get("inv")]
    def o(m,c): return opts(c["s"],c["h"],m,c.get("page",64),"ragged" in c,c.get("inv",False),c.get("causal",True),c.get("L",512),c.get("R",64))
    compile_all(vs,[o(m,c) for m,c in all_])
    for m,c in all_:
        C=Case(mode=m,**c); w,wl=C.want()
        for v in vs:
            run=C.runner(v)
            if run is None: print("no object",v,c); continue
            bits=None
            for rep in range(3):
                for t in run.keep[6:8]: t.fill_(float("nan"))
                out,lse=run(); torch.cuda.synchronize()
                b=out.view(torch.int16).clone()
                if bits is not None and not torch.equal(bits,b): print("NOT REPEATABLE",v,m,c)
                bits=b
            d=(out.double()-w).norm()/w.norm().clamp(min=1e-37); fin=torch.isfinite(wl)
            le=(lse.double()-wl)[fin].abs().max().item() if fin.any() else 0; bad=not torch.equal(torch.isinf(lse),~fin) or not torch.isfinite(out).all().item()
            zero=out[~fin].abs().max().item() if (~fin).any() else 0
            ok=d.item()<(6e-3) and le<2e-2 and not bad and zero==0
            print("ok " if ok else "BAD",v,m,f"rel {d.item():.2e} lse {le:.1e}",{k:(x if k!='lens' else (x if len(x)<8 else len(x))) for k,x in c.items() if k!='ragged'},"ragged" if "ragged" in c else "",flush=True)
            if not ok:
                e=(out.double()-w).flatten(1).norm(dim=1)/w.flatten(1).norm(dim=1).clamp(min=1e-37); print("   worst tokens",e.topk(min(5,len(e))).indices.tolist(),e.topk(min(5,len(e))).values.tolist(), "nan",torch.isnan(out).sum().item(), "lse nan",torch.isnan(lse).sum().item())
def bench(vs,modes,points,varlens,iters,peers_on):
    import torch
    sys.path.insert(0,f"{ROOT}/benchmarks"); from timing import time_all
    compile_all(vs,[opts(s,h,m) for m in modes for _,s,h,_ in points])
    peers=None
    if peers_on: import peers; found=peers.load()
    rows=[]
    for var,(b,s,h,keys) in itertools.product(varlens,points):
        fs={}; g=__import__("random").Random(b*keys+s)
        lens=[keys]*b if not var else [g.randint(keys//2,keys*3//2) for _ in range(b)] if var==1 else [keys+g.randint(-60,60) for _ in range(b)] if var==2 else [keys*3//2-(keys*i)//max(b-1,1) for i in range(b)]
        for m in modes:
            C=Case(s,h,m,lens,nan=False)
            for v in vs:
                r=C.runner(v)
                if r: fs[f"{m}:{v}"]=r
            if peers_on:
                c4=C.cache.view(-1,64,1,576); tb=C.table.clamp(max=C.cache.shape[0]-1); q=C.q.view(b,s,h,576)
                if m=="q8" and "flashmla_fp8" in found: fs["fm8"]=peers.flashmla_fp8(q,c4,tb,C.lens_gpu,C.scale,True,*(torch.tensor([x],device="cuda") for x in (C.qs,C.kvs)))
                if m=="bf16" and "flashmla" in found: fs["fm"]=peers.flashmla(q,c4,tb,C.lens_gpu,C.scale,True)
            fs_keep=C
        t=time_all(fs,iters); rate,byte=(1.596e15,576) if "q8" in modes else (798e12,1152)
        fl=max(2*s*h*sum(lens)*1088/rate,sum(lens)*byte/4.35e12)*1e6
        print(f"{b:3d} {s} {h:3d} {keys:6d} {'v' if var else ' '} floor {fl:7.1f} "+" ".join(f"{k} {x:7.1f}" for k,x in t.items()),flush=True)
        rows.append(dict(b=b,s=s,h=h,keys=keys,var=var,floor=fl,**t)); json.dump(rows,open(os.environ.get("OUT","/tmp")+"/bench.json","w"))
if __name__=="__main__":
    a=argparse.ArgumentParser(); a.add_argument("what"); a.add_argument("--v",default="head"); a.add_argument("--points",default=""); a.add_argument("--modes",default="q8"); a.add_argument("--varlen",default="0"); a.add_argument("--iters",type=int,default=15); a.add_argument("--peers",action="store_true"); a=a.parse_args()
    vs=a.v.split(","); modes=a.modes.split(",")
    for v in vs: make(v)
    if "check" in a.what: check(vs,modes)
    if "bench" in a.what: bench(vs,modes,[tuple(map(int,p.split(","))) for p in a.points.split("/")],[int(x) for x in a.varlen.split(",")],a.iters,a.peers)
