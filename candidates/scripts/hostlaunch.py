import sys,time,statistics; sys.path.insert(0,".gpu")
import dev, torch
vs=sys.argv[1].split(",")
for v in vs: dev.make(v)
C=dev.Case(1,16,"bf16",[256]*4,nan=False)
runs={}
for v in vs:
    r=C.runner(v)
    la=dev.launcher(v,C.o); 
    ts=[t for t in r.keep]
    from tsmla_kernels.launch import ArrayView
    shapes=[tuple(t.shape) if t.numel()!=8192 else (2,) for t in ts]
    f=la.bind(shapes); ad=[t.data_ptr() for t in ts]
    runs[v]=(f,ad,la)
res={v:[] for v in vs}
for rnd in range(60):
    for v in vs:
        f,ad,_=runs[v]
        t=time.perf_counter()
        for _ in range(50): f(0,ad)
        res[v].append((time.perf_counter()-t)/50*1e6); torch.cuda.synchronize()
print({v:(round(statistics.median(x),2),round(min(x),2)) for v,x in res.items()})
