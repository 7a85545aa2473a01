import random
class Bar:
    def __init__(s,count): s.count=count; s.pending=count; s.phase=0
    def arrive(s):
        s.pending-=1; assert s.pending>=0
        if s.pending==0: s.phase^=1; s.pending=s.count
    def done(s,parity): return s.phase!=parity   # waiting for phase with this parity to complete
def run(seed,groups=3,stages=2):
    rng=random.Random(seed)
    tiles=[]
    for t in range(rng.randint(0,12)):
        b=rng.choice([1,1,2,3,5,9]); tiles.append((b,[ (b>1 and rng.random()<(0.7 if g==0 else .3 if g==1 else 0)) for g in range(groups)]))
    B=lambda c:[Bar(c) for _ in range(stages)]
    kf,ke,ld,lf,vf,ve=B(1),B(groups),B(1),B(2),B(2),B(groups)
    qf,qe=[Bar(1) for _ in range(groups)],[Bar(1) for _ in range(groups)]
    K=[None]*stages;L=[None]*stages;V=[[None]*stages for _ in range(2)];Q=[None]*groups
    slots={}
    inflight=[]  # async tma
    def adv(i,p):
        i+=1
        if i==stages: i=0;p^=1
        return i,p
    def tma():
        i,p=0,1;qp=1;slot=0
        slots[0]=tiles[0] if tiles else None
        while True:
            t=slots[slot%8]
            if t is None: break
            for b in range(t[0]):
                n=t[0]-1-b
                while not ke[i].done(p): yield
                inflight.append((K,i,(slot,n),kf[i])); yield
                while not lf[i].done(p): yield
                inflight.append((L,i,(slot,n),ld[i])); yield
                i,p=adv(i,p)
                if b==0:
                    for g in range(groups):
                        while not qe[g].done(qp): yield
                        inflight.append((Q,g,slot,qf[g])); yield
                    qp^=1
                    slots[(slot+1)%8]=tiles[slot+1] if slot+1<len(tiles) else None
            slot+=1
        while not lf[i].done(p): yield
        ld[i].arrive()
        for g in range(groups):
            while not qe[g].done(qp): yield
            qf[g].arrive()
    def turner(w):
        i,p=0,0;slot=0
        while not ld[0].done(0): yield
        t=slots[0]
        while t is not None:
            for b in range(t[0]):
                while not ld[i].done(p): yield
                while not ve[i].done(p^1): yield
                assert L[i]==(slot,t[0]-1-b),(L[i],slot,b)
                yield
                V[w][i]=L[i]; yield
                lf[i].arrive(); vf[i].arrive()
                i,p=adv(i,p)
            slot+=1
            while not ld[i].done(p): yield
            t=slots[slot%8]
    out=[]
    def wg(g):
        tile=0;qp=0
        def mine(): return None
        while not qf[g].done(qp): yield
        t=slots[0]
        if t is None: return
        blocks=t[0]; i=0
        def qk(i,p,exp):
            while not kf[i].done(p): yield
            assert K[i]==exp and Q[g]==exp[0],(K[i],Q[g],exp); yield
        def pv(i,p,exp):
            while not vf[i].done(p): yield
            assert V[0][i]==exp and V[1][i]==exp,(V[0][i],V[1][i],exp); yield
            yield
            assert V[0][i]==exp and V[1][i]==exp
        i,p=0,0
        yield from qk(i,p,(0,blocks-1)); ke[i].arrive()
        vi,vp,ve_id=i,p,(0,blocks-1)
        i,p=adv(i,p)
        while blocks>0:
            for b in range(blocks-1):
                n=blocks-2-b
                yield from qk(i,p,(tile,n)); 
                yield from pv(vi,vp,ve_id)
                ke[i].arrive(); yield
                ve[vi].arrive(); out.append(ve_id) if g==0 else None
                vi,vp,ve_id=i,p,(tile,n)
                i,p=adv(i,p)
            qe[g].arrive(); qp^=1
            while not qf[g].done(qp): yield
            t=slots[(tile+1)%8]
            blocks=t[0] if t else 0
            if blocks>0:
                unseen=t[1][g]; pi,pp=i,p
                if unseen:
                    blocks-=1
                    while not kf[i].done(p): yield
                    ke[i].arrive(); i,p=adv(i,p)
                yield from qk(i,p,(tile+1,blocks-1))
                yield from pv(vi,vp,ve_id)
                ke[i].arrive()
                if unseen:
                    while not vf[pi].done(pp): yield
                    ve[pi].arrive()
                yield
                ve[vi].arrive()
                vi,vp,ve_id=i,p,(tile+1,blocks-1)
                i,p=adv(i,p)
                tile+=1
        yield from pv(vi,vp,ve_id)
    live={('tma',):tma(),**{('t',w):turner(w) for w in range(2)},**{('g',g):wg(g) for g in range(groups)}}
    speed={k:rng.choice([.05,.3,1]) for k in live}
    idle=0
    while live or inflight:
        if inflight and rng.random()<.3:
            mem,i,v,bar=inflight.pop(rng.randrange(len(inflight))); mem[i]=v; bar.arrive(); idle=0; continue
        if not live: continue
        k=rng.choice(list(live))
        if rng.random()>speed[k]: idle+=1; 
        else:
            before=(sum(b.pending+b.phase*100 for x in (kf,ke,ld,lf,vf,ve,qf,qe) for b in x))
            try: next(live[k]); idle+=1
            except StopIteration: del live[k]; idle=0
            after=(sum(b.pending+b.phase*100 for x in (kf,ke,ld,lf,vf,ve,qf,qe) for b in x))
            if before!=after: idle=0
        if idle>20000: return 'deadlock',seed,list(live)
    return None
import sys
bad=[r for s in range(1500) if (r:=run(s))]
print('bad',bad[:3],len(bad))
