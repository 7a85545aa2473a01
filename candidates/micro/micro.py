"""Rates of WGMMA chains: python3 micro.py compile|run"""
import sys, math, os
import cuda.bindings.driver as cuda
import cutlass, cutlass.cute as cute, cutlass.utils as utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, OperandSource, SmemLayoutAtomKind
BF=cutlass.BFloat16
class Micro:
    """groups: list of ("rs"|"ss"|"pv", n, chains, steps) one a warpgroup."""
    def __init__(self, groups, iters=64): self.groups, self.iters = groups, iters
    def mma(self,kind,n):
        k_major, mn = OperandMajorMode.K, OperandMajorMode.MN
        if kind=="rs": return sm90.make_trivial_tiled_mma(BF,BF,k_major,k_major,Float32,(1,1,1),(64,n),OperandSource.RMEM)
        if kind=="ss": return sm90.make_trivial_tiled_mma(BF,BF,k_major,k_major,Float32,(1,1,1),(64,n))
        return sm90.make_trivial_tiled_mma(BF,BF,k_major,mn,Float32,(1,1,1),(64,n))
    @cute.jit
    def __call__(self, stream: cuda.CUstream, out: cute.Tensor):
        mmas=[self.mma(kind,n) for kind,n,_,_ in self.groups]
        self.kern(out,*mmas).launch(grid=[132,1,1],block=[128*len(self.groups),1,1],stream=stream)
    @cute.kernel
    def kern(self, out: cute.Tensor, m0: cute.TiledMma, m1: cute.TiledMma=None, m2: cute.TiledMma=None):
        tidx,_,_=cute.arch.thread_idx(); bidx,_,_=cute.arch.block_idx()
        g=cute.arch.make_warp_uniform(tidx//128)
        smem=utils.SmemAllocator()
        atom=warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.K_SW128,BF)
        lq=cute.tile_to_shape(atom,(64,576),(0,1)); lk=cute.tile_to_shape(atom,(64,576),(0,1))
        q=smem.allocate_tensor(BF,lq.outer,byte_alignment=1024,swizzle=lq.inner)
        k=smem.allocate_tensor(BF,lk.outer,byte_alignment=1024,swizzle=lk.inner)
        w=cute.make_tensor(cute.recast_ptr(q.iterator,cute.make_swizzle(0,4,3),dtype=Int32),cute.make_layout((128*len(self.groups),2*64*576//2//(128*len(self.groups)))))
        for i in cutlass.range(cute.size(w,mode=[1]),unroll=1): w[tidx,i]=Int32(0)
        cute.arch.fence_proxy("async.shared",space="cta"); cute.arch.sync_threads()
        if const_expr(len(self.groups)==1): self.body(0,out,q,k,m0,tidx,bidx)
        else:
            if g==0: self.body(0,out,q,k,m0,tidx%128,bidx)
            elif g==1: self.body(1,out,q,k,m1,tidx%128,bidx)
            else:
                if const_expr(len(self.groups)>2): self.body(2,out,q,k,m2,tidx%128,bidx)
    @cute.jit
    def body(self, which: cutlass.Constexpr, out, q, k, mma, t, bidx):
        kind,n,chains,steps=self.groups[which]
        thr=mma.get_slice(t)
        accs=[cute.make_rmem_tensor(thr.partition_shape_C((64,n)),Float32) for _ in range(chains)]
        for a in accs: a.fill(0.0)
        if const_expr(kind=="pv"):
            v=cute.make_tensor(k.iterator,cute.select(k.layout,mode=[1,0])); v=cute.local_tile(v,(n,64),((which-1)%2,0))
            B=mma.make_fragment_B(thr.partition_B(v)); A=mma.make_fragment_A(thr.partition_A(cute.local_tile(q,(64,64),(0,0))))
        else:
            B=mma.make_fragment_B(thr.partition_B(cute.local_tile(k,(n,576),(0,0))))
            if const_expr(kind=="rs"):
                A=cute.make_rmem_tensor(thr.partition_shape_A((64,16*min(steps,24))),BF); 
                r=cute.recast_tensor(A,Int32)
                for i in cutlass.range_constexpr(cute.size(r)): r[i]=t*0
            else: A=mma.make_fragment_A(thr.partition_A(q))
        mma.set(Field.ACCUMULATE,True)
        cute.arch.sync_threads()
        t0=cute.arch.clock()
        for it in cutlass.range(self.iters,unroll=1):
            warpgroup.fence()
            for s in cutlass.range_constexpr(steps):
                a=accs[s%chains]
                cute.gemm(mma,a,A[None,None,s%24 if kind=="rs" else s],B[None,None,s],a)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        t1=cute.arch.clock()
        total=Float32(0.0)
        for a in accs:
            for i in cutlass.range_constexpr(cute.size(a)): total+=a[i]
        if t==0:
            out[bidx,which]=Float32(t1-t0)+total
CASES={
 "rs32x1":[("rs",32,1,36)],"rs32x2":[("rs",32,2,36)],"rs64x1":[("rs",64,1,36)],"ss32x1":[("ss",32,1,36)],"ss32x2":[("ss",32,2,36)],"ss64x1":[("ss",64,1,36)],
 "pv256":[("pv",256,1,4)],"pv256x2g":[("pv",256,1,4)]*2,
 "rs32+2pv":[("rs",32,1,36),("pv",256,1,2),("pv",256,1,2)],"rs32x2+2pv":[("rs",32,2,36),("pv",256,1,2),("pv",256,1,2)],"rs64+2pv":[("rs",64,1,36),("pv",256,1,4),("pv",256,1,4)],
 "ss64+2pv":[("ss",64,1,36),("pv",256,1,4),("pv",256,1,4)],"ss32+2pv":[("ss",32,1,36),("pv",256,1,2),("pv",256,1,2)],
 "rs32 alone half":[("rs",32,1,18)],
}
if __name__=="__main__":
    import concurrent.futures
    comp={}
    def make(n):
        o=cute.runtime.make_fake_compact_tensor(Float32,(132,4),stride_order=(1,0)) if False else None
    import torch
    from cutlass.cute.runtime import from_dlpack
    dev="cuda" if sys.argv[1]=="run" else "cpu"
    for n,gs in CASES.items():
        out=torch.zeros((132,4),dtype=torch.float32,device=dev)
        m=Micro(gs)
        try:
            if dev=="cpu":
                from cutlass.cute.runtime import make_fake_stream, make_fake_compact_tensor
                f=cute.compile(m,make_fake_stream(),make_fake_compact_tensor(Float32,(132,4),stride_order=(1,0)),options="--gpu-arch sm_90a")
                print(n,"ok",flush=True); continue
            st=cuda.CUstream(torch.cuda.current_stream().cuda_stream); t=from_dlpack(out)
            f=cute.compile(m,st,t)
            for _ in range(3): f(st,t)
            torch.cuda.synchronize(); r=out.cpu()
            print(f"{n:14s}"," | ".join(f"{g[0]}{g[1]} chains {g[2]}: {r[:,i].median().item()/m.iters/g[3]:.1f} cyc/step ({r[:,i].median().item()/m.iters:.0f}/iter; ideal {g[1]//2}/step)" for i,g in enumerate(gs)),flush=True)
        except Exception as e: print(n,"FAILED",str(e)[:600],flush=True)
