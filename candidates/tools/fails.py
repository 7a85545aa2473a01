import json,sys
from collections import defaultdict
g=defaultdict(dict)
for r in json.load(open(sys.argv[1])): g[(r['varlen'],r['b'],r['s'],r['h'],r['keys'])][r['peer']]=r
L=[]
for k,v in g.items():
    n,best=min(((n,r['us']) for n,r in v.items() if not n.startswith('tsmla')),key=lambda x:x[1]); t=v['tsmla']['us']; f=v['tsmla']['floor_us']
    if f/best<.6: L.append((round(t/best,3),k,n,best,t))
L.sort(reverse=True)
for x in L: 
    if x[0]>.75: print(x)
