import sys, torch, json, os, random
sys.path.insert(0,"benchmarks"); from timing import time_all
src=open(".gpu/ceil.py").read(); SRC=src.split("r'''")[1].split("'''")[0]
SRC=SRC.replace("int chunk, int stages, int* out)","int chunk, int stages, int* out, const int* order, long long* times)")
SRC=SRC.replace("p+n*(long)chunk","p+(order?order[n]:n)*(long)chunk")
SRC=SRC.replace("if(total<0) out[0]=sm[0];","if(times){ unsigned sm_; long long t; asm volatile(\"mov.u32 %0, %%smid;\":\"=r\"(sm_)); asm volatile(\"mov.u64 %0, %%globaltimer;\":\"=l\"(t)); times[2*blockIdx.x]=sm_; times[2*blockIdx.x+1]=t;} if(total<0) out[0]=sm[0];")
k=torch.cuda._compile_kernel(SRC,"readall"); out=torch.zeros(16,dtype=torch.int32,device="cuda"); buf=torch.zeros((4*81920*1152*2)//4,dtype=torch.int32,device="cuda")
chunk=36864; k.set_shared_memory_config(6*chunk+64)
n=4*81920*1152//chunk; pages=list(range(n//2)); random.Random(0).shuffle(pages); order=torch.tensor([2*p+i for p in pages for i in (0,1)],dtype=torch.int32,device="cuda")
inter=torch.tensor([ (i%132)*(n//132)+i//132 for i in range(n//132*132)],dtype=torch.int32,device="cuda")
none=torch.zeros(0,dtype=torch.int32,device="cuda"); times=torch.zeros(264,dtype=torch.int64,device="cuda")
def f(st,o,t=0,by=n*chunk): return lambda: k((132,1,1),(32,1,1),(buf,by,chunk,st,out,o if o is not None else 0,times if t else 0),shared_mem=6*chunk+64)
fs={f"{st} stages {nm}":f(st,o) for st in (6,5,4,3) for nm,o in (("in order",None),("random pages",order))}
fs["6 half the bytes, random"]=f(6,order,0,n//2*chunk)
for name,t in time_all(fs,21).items(): print(f"{name:28s} {t:8.2f}")
flush=torch.zeros(64<<20,device="cuda")
for st in (6,4):
    for _ in range(3): flush.amax(); f(st,order,1)(); torch.cuda.synchronize()
    r=times.view(-1,2).cpu(); t=(r[:,1]-r[:,1].max()).tolist(); s=sorted(zip(t,r[:,0].tolist())); print(st,"ends before the last, ns:",[x for x,_ in s][::8],"first 24 SMs",sorted(x for _,x in s[:24]))
