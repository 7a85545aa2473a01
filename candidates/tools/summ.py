import json,math,collections,sys
f=sys.argv[1]; rows=json.load(open(f))
pts=collections.defaultdict(dict)
for r in rows: pts[(r['b'],r['keys'],r['h'],r['s'],r['varlen'])][r['peer']]=r
def gm(x): return math.exp(sum(map(math.log,x))/len(x))
by=collections.defaultdict(list); fl=collections.defaultdict(list); us=collections.defaultdict(list)
allr=[];err=[]
for k,p in pts.items():
    best=min(r['us'] for n,r in p.items() if not n.startswith('tsmla'))
    x=p['tsmla']['us']/best
    key=(k[0],k[1]);
    by[key,k[2]*k[3]].append(x); fl[key,k[2]*k[3]].append(p['tsmla']['floor_us']/p['tsmla']['us']); us[key,k[2]*k[3]].append((p['tsmla']['us'],best)); allr.append(x)
    if 'flashmla' in p: err.append(p['tsmla']['rel_err']/p['flashmla']['rel_err'])
print('geomean',gm(allr),'worst',max(allr),'n',len(allr),'ahead',sum(x<1 for x in allr))
print('err ratio min/max',min(err),max(err))
keys=sorted({k[0] for k in by}); rows_=sorted({k[1] for k in by})
print('%14s'%'', *('%12d'%r for r in rows_))
for k in keys: print('%14s'%str(k), *('%5.2f %5.2f '%(gm(by[k,r]),gm(fl[k,r])) for r in rows_), '%.3f'%gm([x for r in rows_ for x in by[k,r]]))
