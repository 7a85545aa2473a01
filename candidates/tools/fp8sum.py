import json,math,sys
from collections import defaultdict
g=defaultdict(dict)
for r in json.load(open(sys.argv[1])): g[(r['varlen'],r['b'],r['s'],r['h'],r['keys'])][r['peer']]=r
print(set(n for v in g.values() for n in v))
gm=lambda x: math.exp(sum(map(math.log,x))/len(x)) if x else float('nan')
T=defaultdict(list)
for k,v in g.items():
    T[(k[0],(k[1],k[4]),k[2]*k[3])].append(v['tsmla']['us']/v['flashmla']['us'])
rows=sorted({k[2] for k in T}); sz=((1,4096),(1,32768),(4,81920),(16,8192),(32,81920),(64,8192),(128,4096))
for var in (False,True):
    print("varlen" if var else "fixed", "rows:",rows)
    for s in sz: print(s,["%.2f"%gm(T[(var,s,r)]) for r in rows], "%.3f"%gm([x for r in rows for x in T[(var,s,r)]]))
print("all %.4f"%gm([x for t in T.values() for x in t]))
