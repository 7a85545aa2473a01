# Error of out under several ways of normalising: numpy, inputs like the benchmark's
import numpy as np, torch, sys
torch.manual_seed(int(sys.argv[2]) if len(sys.argv)>2 else 0)
N=int(sys.argv[1]); H=128; L=512; R=64
def inputs():
    kv=torch.randn(N,L+R,dtype=torch.float32)/ (1.0)
    q=torch.randn(H,L+R)
    return q,kv
import importlib
q,kv=inputs()
q=q.to(torch.bfloat16).float(); kv=kv.to(torch.bfloat16).float()
scale=float(sys.argv[3]) if len(sys.argv)>3 else (192)**-0.5
s=(q.double()@kv.double().T)*scale
p=torch.softmax(s,-1); ref=p@kv[:,:L].double()
bf=lambda x:x.to(torch.bfloat16).double()
def rel(o): o=bf(o); return float((o-ref).norm()/ref.norm())
m=s.max(-1,keepdim=True).values
P=torch.exp(s-m).float().double()
V=kv[:,:L].double()
print('N',N,'std of s',float(s.std()),'exact+round',rel(ref))
print('follow max, exact sum  ',rel(bf(P)@V/P.sum(-1,keepdim=True)))
print('follow max, rounded sum',rel(bf(P)@V/bf(P).sum(-1,keepdim=True)))
lag=torch.rand(H,1,dtype=torch.float64)*8*np.log(2)  # reference lags by up to 2^8
P2=torch.exp(s-m+lag)
print('lag, exact sum  ',rel(bf(P2)@V/P2.sum(-1,keepdim=True)))
print('lag, rounded sum',rel(bf(P2)@V/bf(P2).sum(-1,keepdim=True)))
