import json,sys
g={}
for r in json.load(open(sys.argv[1])):
    if r['peer']=='tsmla': g[(r['varlen'],r['b'],r['s'],r['h'],r['keys'])]=r
for k,r in g.items():
    if k[0]: continue
    v=g[(True,)+k[1:]]
    print(k[1:],"uni %.1f/%.1f=%.3f rag %.1f/%.1f=%.3f ratio %.3f"%(r['floor_us'],r['us'],r['floor_us']/r['us'],v['floor_us'],v['us'],v['floor_us']/v['us'],v['us']/v['floor_us']*r['floor_us']/r['us']), "extra %.1f"%(v['us']-r['us']*v['floor_us']/r['floor_us']))
