import sys
f=sys.argv[1]; sys.argv=["x",f]
import srcsum as S
prev=None; start=0
for i,r in enumerate(S.data+[None]):
    e=r and r[S.ix["Instructions Executed"]]
    if e!=prev:
        if prev is not None:
            n=sum(int(x[S.ix["# Samples"]]) for x in S.data[start:i])
            if n>100: print(start,i,"exec",prev,"samples",n, "per warp", round(n/4))
        start,prev=i,e
