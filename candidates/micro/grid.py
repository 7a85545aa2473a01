"""Is %gridid new at each graph replay; what a barrier through flags costs; cooperative launches on two streams."""
import sys, time
import cuda.bindings.driver as cuda
import cutlass, cutlass.cute as cute, cutlass.utils as utils
from cutlass import Int32, Int64, const_expr
class K:
    def __init__(s, cluster=1, coop=False, flags=False, pdl=False): s.c, s.coop, s.flags, s.pdl = cluster, coop, flags, pdl
    @cute.jit
    def __call__(self, stream: cuda.CUstream, flags: cute.Tensor, out: cute.Tensor):
        self.main(flags, out).launch(grid=[132,1,1], block=[384,1,1], cluster=[self.c,1,1], stream=stream, cooperative=self.coop, min_blocks_per_mp=1)
        if const_expr(self.pdl):
            self.second(out).launch(grid=[132,1,1], block=[1024,1,1], stream=stream, use_pdl=True)
    @cute.kernel
    def second(self, out: cute.Tensor):
        tidx,_,_=cute.arch.thread_idx(); b,_,_=cute.arch.block_idx()
        smem=utils.SmemAllocator(); x=smem.allocate(100<<10, 128)
        cute.arch.griddepcontrol_wait()
        if tidx==0: out[b]=out[b]+1
    @cute.kernel
    def main(self, flags: cute.Tensor, out: cute.Tensor):
        tidx,_,_=cute.arch.thread_idx(); b,_,_=cute.arch.block_idx()
        smem=utils.SmemAllocator(); x=smem.allocate(200<<10, 128)
        lo,hi=Int32(cute.arch.gridid()),Int32(0)
        t0=cute.arch.clock()
        if const_expr(self.flags):
            if tidx==0:
                cute.arch.inline_ptx("fence.acq_rel.gpu; st.release.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[(flags.iterator+b).toint(), lo])
            if tidx<132:
                at=(flags.iterator+tidx).toint()
                seen=lo-1
                while seen!=lo:
                    seen=cute.arch.inline_ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[at])
            cute.arch.sync_threads()
        t1=cute.arch.clock()
        if tidx==0:
            out[b]=lo; out[132+b]=hi; out[264+b]=t1-t0
        if const_expr(self.pdl): cute.arch.griddepcontrol_launch_dependents()
def build():
    from cutlass.cute.runtime import make_fake_compact_tensor as fk
    cases=dict(plain=K(), coop=K(coop=True), flags=K(coop=True,flags=True), flags2=K(2,True,True), flagsnc=K(flags=True), pdl=K(pdl=True), plain2=K(2))
    return {n: cute.compile(k, cuda.CUstream(0), fk(Int32,(1000,)), fk(Int32,(1000,))) for n,k in cases.items()}
if __name__=="__main__":
    fs=build()
    if sys.argv[1]=="compile": print("ok"); sys.exit()
    import torch
    from cutlass.cute.runtime import from_dlpack
    N=20
    fl=[torch.full((1000,),-7,dtype=torch.int32,device="cuda") for _ in range(N)]; outs=[torch.zeros(1000,dtype=torch.int32,device="cuda") for _ in range(N)]
    S=torch.cuda.Stream()
    for n,f in fs.items():
        st=cuda.CUstream(S.cuda_stream)
        with torch.cuda.stream(S):
            f(st,from_dlpack(fl[0]),from_dlpack(outs[0])); torch.cuda.synchronize()
            g=torch.cuda.CUDAGraph()
            with torch.cuda.graph(g,stream=S):
                for i in range(N): f(st,from_dlpack(fl[i]),from_dlpack(outs[i]))
            ids=[]
            for r in range(4):
                g.replay(); torch.cuda.synchronize(); ids.append((outs[0][0].item(),outs[0][132].item(),outs[1][0].item(),int((outs[1][:132]==outs[1][0]).all())))
            ts=[]
            for r in range(10):
                a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
                a.record(S); g.replay(); b.record(S); b.synchronize(); ts.append(a.elapsed_time(b)*1e3/N)
            cyc=outs[3][264:396].float()
        print(n,"us a launch %.2f"%sorted(ts)[5],"ids",ids,"cycles mean %.0f min %.0f max %.0f"%(cyc.mean(),cyc.min(),cyc.max()),flush=True)
    # distinct eager launches
    e=[]
    for r in range(3):
        fs["flags"](cuda.CUstream(S.cuda_stream),from_dlpack(fl[0]),from_dlpack(outs[0])); torch.cuda.synchronize(); e.append((outs[0][0].item(),outs[0][132].item()))
    print("eager ids",e,flush=True)
    if "two" in sys.argv:
        for name in ("flags","flagsnc"):
            s2=[torch.cuda.Stream() for _ in range(4)]; t0=time.time()
            args=[(cuda.CUstream(s.cuda_stream),from_dlpack(fl[i]),from_dlpack(outs[i])) for i,s in enumerate(s2)]
            for r in range(200):
                for a in args: fs[name](*a)
            print(name,"queued",flush=True)
            torch.cuda.synchronize(); print(name,"four streams x 200: ended %.3f s"%(time.time()-t0),flush=True)
