import json,math,sys
from collections import defaultdict
g=defaultdict(dict)
for r in json.load(open(sys.argv[1])): g[(r['varlen'],r['b'],r['s'],r['h'],r['keys'])][r['peer']]=r
gm=lambda x: math.exp(sum(map(math.log,x))/len(x)) if x else float('nan')
R={}
for k,v in g.items():
    best=min(r['us'] for n,r in v.items() if not n.startswith('tsmla')); R[k]=(v['tsmla']['us']/best,v['tsmla']['floor_us']/best,v['tsmla']['floor_us']/v['tsmla']['us'],v['tsmla']['us'])
for var in (False,True,None):
    x={k:r for k,r in R.items() if var is None or k[0]==var}
    slow=[r[0] for r in x.values() if r[1]<.6]
    mem=[r[2] for k,r in x.items() if k[2]*k[3]<=64 and k[1]*k[4]*1152>=.3e9]
    com=[r[2] for k,r in x.items() if k[2]*k[3]>=128 and k[1]*k[2]*k[3]*k[4]>=3e7]
    print({False:"fixed",True:"varlen",None:"both"}[var],len(x),"geomean %.4f worst %.3f ahead %d"%(gm([r[0] for r in x.values()]),max(r[0] for r in x.values()),sum(r[0]<1 for r in x.values())),"| peer<60%%: %d of %d at .75, mean %.3f max %.2f"%(sum(s<=.75 for s in slow),len(slow),gm(slow),max(slow)),"| mem %d/%d at 92%%, min %.2f | comp %d/%d at 85%%, min %.2f"%(sum(m>=.92 for m in mem),len(mem),min(mem),sum(c>=.85 for c in com),len(com),min(com)))
    for sz in ((1,4096),(1,32768),(4,81920),(16,8192),(32,81920),(64,8192),(128,4096)): print("  ",sz,"%.3f"%gm([r[0] for k,r in x.items() if (k[1],k[4])==sz]),end="")
    print()
for b,keys in ((1,4096),(1,32768),(4,81920),(16,8192),(64,8192),(128,4096),(32,81920)):
    print((b,keys),"S4/S1 H16: fixed %.3f"%(R[(False,b,4,16,keys)][3]/R[(False,b,1,16,keys)][3]), end="; ")
print("\nworst", sorted(((round(r[0],3),k) for k,r in R.items()),reverse=True)[:8])
print("mem misses", sorted((round(r[2],3),k) for k,r in R.items() if k[2]*k[3]<=64 and k[1]*k[4]*1152>=.3e9 and r[2]<.92))
print("comp misses", sorted((round(r[2],3),k) for k,r in R.items() if k[2]*k[3]>=128 and k[1]*k[2]*k[3]*k[4]>=3e7 and r[2]<.85))
print("rag/uniform", gm([R[(True,)+k[1:]][3]/R[k][3]*g[k]['tsmla']['floor_us']/g[(True,)+k[1:]]['tsmla']['floor_us'] for k in R if not k[0] and (True,)+k[1:] in R]))
e=[v['tsmla']['rel_err']/v['flashmla']['rel_err'] for v in g.values() if 'flashmla' in v]; print("err",min(e),max(e),"over 1:",sum(x>1.0 for x in e), "lse",max(v['tsmla'].get('lse_err',0) for v in g.values()))
