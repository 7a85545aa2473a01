import sys; sys.path.insert(0,".gpu")
import dev, torch
NAMES="start sched0 sched1 piece0 Qissued keysissued Qthere Qregs QK0done scoresdone lastPV stored announced collected merged".split()
v=sys.argv[1]; dev.make(v)
pts=[(tuple(map(int,p.split(","))),m) for p,m in (x.split(":") for x in sys.argv[2:])]
dev.compile_all([v],[dev.opts(s,h,m) for (b,s,h,k),m in pts])
big=torch.empty(64<<20,device="cuda")
for (b,s,h,keys),m in pts:
    C=dev.Case(s,h,m,[keys]*b,nan=False); run=C.runner(v); acc=[]
    for r in range(12):
        big.sum(); run(); torch.cuda.synchronize()
        n=132; x=run.keep[10][-4096:,0][:n*16].view(n,16).clone().cpu().long(); x=x[:,:15]-x[:,0].min()
        if r>=4: acc.append(x.double())
    a=torch.stack(acc)/1e3
    print(b,s,h,keys,m); print("  mean "+" ".join(f"{nm} {t:.2f}" for nm,t in zip(NAMES,a.mean((0,1)).tolist()))); print("  max  "+" ".join(f"{nm} {t:.2f}" for nm,t in zip(NAMES,a.max(1).values.mean(0).tolist())),flush=True)
