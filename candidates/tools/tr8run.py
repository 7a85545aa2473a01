"""tr8run.py v b,s,h,keys ...: cycles of a block by role"""
import statistics, sys
sys.path.insert(0, ".gpu")
import dev, torch
v=sys.argv[1]; dev.make(v)
for p in sys.argv[2:]:
    b,s,h,keys=map(int,p.split(",")); dev.compile_all([v],[dev.opts(s,h,"q8")])
    C=dev.Case(s,h,"q8",[keys]*b,nan=False); run=C.runner(v)
    for _ in range(3): run()
    torch.cuda.synchronize()
    x=run.keep[5][64:64+800].clone().view(torch.int32).cpu().view(100,8).long()
    n=min(90,keys//64-2)
    x=x[:n]; base=x[6,0]
    for i in range(6,14): print(i,[int(t-base) for t in x[i,:7]])
    m=lambda a,b,o=0: round(statistics.mean((x[i+o,b]-x[i,a]).item() for i in range(6,n-2)),0)
    print(v,p,"period",m(0,0,1),"QK",m(0,1),"softmax",m(1,2),"P to next QK",m(2,0,1),"| values: read",m(3,4),"wait",m(4,5),"PV",m(5,6),"rest",m(6,3,1),"QK end to PV begin",m(1,5),flush=True)
