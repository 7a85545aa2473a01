import json,math,sys
from collections import defaultdict
g=defaultdict(dict)
for r in json.load(open(sys.argv[1])): g[(r['varlen'],r['b'],r['s'],r['h'],r['keys'])][r['peer']]=r
b=defaultdict(dict)
for r in json.load(open(sys.argv[2])): b[(r['varlen'],r['b'],r['s'],r['h'],r['keys'])][r['peer']]=r
R=sorted((v['tsmla']['us']/v['flashmla']['us'],k) for k,v in g.items()); print('ratio best',R[0],'worst',R[-3:],'ahead',sum(x<1 for x,_ in R),len(R))
mem=[(v['tsmla']['floor_us']/v['tsmla']['us'],k) for k,v in g.items() if k[2]*k[3]<=64 and k[1]*k[4]*576>=.3e9]
mem2=[(v['tsmla']['floor_us']/v['tsmla']['us'],k) for k,v in g.items() if k[2]*k[3]<=32 and k[1]*k[4]*576>=.3e9]
print('mem',len(mem),sum(m>=.88 for m,_ in mem),min(mem),'<=32 rows',len(mem2),sum(m>=.88 for m,_ in mem2), sorted(mem)[:3])
e=[v['tsmla']['rel_err']/v['flashmla']['rel_err'] for v in g.values()]; print('err vs flashmla',min(e),max(e))
x=[(v['tsmla']['us']/b[k]['tsmla']['us'],k) for k,v in g.items() if k[3]==128 and k[2]>=2 and k[1]*k[4]>=5e5 and k in b and not k[0]]; print('fp8/bf16',min(x),max(x))
q=[v['tsmla_bf16_q']['rel_err']/b[k]['tsmla']['rel_err'] for k,v in g.items() if 'tsmla_bf16_q' in v]; print('bf16 q err',min(q),max(q))
