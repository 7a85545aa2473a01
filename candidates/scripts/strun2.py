import sys; sys.path.insert(0,".gpu")
import dev, torch, random
v=sys.argv[1]; dev.make(v)
pts=[]
for x in sys.argv[2:]:
    p,var=x.split(":"); pts.append((tuple(map(int,p.split(","))),int(var)))
dev.compile_all([v],[dev.opts(s,h,"bf16") for (b,s,h,k),_ in pts])
big=torch.empty(64<<20,device="cuda")
for (b,s,h,keys),var in pts:
    g=random.Random(b*keys+s); lens=[keys]*b if not var else [g.randint(keys//2,keys*3//2) for _ in range(b)] if var==1 else [keys+g.randint(-60,60) for _ in range(b)]
    C=dev.Case(s,h,"bf16",lens,nan=False); run=C.runner(v)
    gr=torch.cuda.CUDAGraph(); run(); torch.cuda.synchronize()
    with torch.cuda.graph(gr): run()
    sc=[t for t in run.keep if t.dim()==1 and t.numel()==8192 and t.dtype==torch.float32][0]
    for r in range(4):
        sc[2:].fill_(-1.0); big.sum(); gr.replay(); torch.cuda.synchronize()
    x=sc[16:16+32*132].clone().cpu().view(132,32).view(torch.int32).long()
    none=torch.tensor(-1.0).view(torch.int32).item()
    base=x[:,0][x[:,0]!=none].min(); T=lambda col: ((col-base).double()/1e3)
    print(b,s,h,keys,"var",var,"blocks",sum(-(-n//32) for n in lens))
    for n in sorted(set(x[:,7].tolist())):
        m=x[:,7]==n; y=x[m]
        if n==none: print("  idle",int(m.sum()),"combine end %.1f"%T(y[:,4]).max().item()); continue
        s_="  pieces %d ctas %d | sched %.1f copies %.1f"%(n,len(y),T(y[:,1]).mean(),T(y[:,2]).mean())
        for p in range(min(n,3)):
            a=[T(y[:,8+4*p+j]) for j in (0,1,2)]; bl=y[:,11+4*p].double()
            s_+=" | p%d blocks %.0f..%.0f first %.1f..%.1f end %.1f..%.1f stored %.1f..%.1f per block %.2f"%(p,bl.min(),bl.max(),a[0].mean(),a[0].max(),a[1].mean(),a[1].max(),a[2].mean(),a[2].max(),((a[1]-a[0])/(bl-1).clamp(min=1)).mean())
        s_+=" | combine go %.1f end %.1f..%.1f, %.1f..%.1f"%(T(y[:,3]).mean(),T(y[:,4]).mean(),T(y[:,4]).max(),T(y[:,5]).mean(),T(y[:,5]).max())
        print(s_)
