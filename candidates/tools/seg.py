import re,sys
name,a,b=sys.argv[1],int(sys.argv[2]),int(sys.argv[3]); pat=sys.argv[4] if len(sys.argv)>4 else r'GMMA|DEPBAR|ARRIVE|SYNCS|BRA|MUFU|STSM|FENCE|REDUX|BSYNC|VOTE|LDSM|F2FP|BAR|WARPSYNC'
s=open(f'/work/notes/sass/{name}.sass').read(); i=s.index('.text.kernel_cutlass_attend'); L=s[i:].splitlines()
out=[]
for l in L:
    m=re.search(r'/\*([0-9a-f]{4,})\*/\s+(.*?);',l)
    if m: out.append((m.group(1),m.group(2)))
q=[n for n,(x,y) in enumerate(out) if 'GMMA' in y]
print(len(out),'gmma at',q)
run=0
for x,y in out[a:b]:
    if re.search(pat,y): print(x,f'(+{run})',y[:78]); run=0
    else: run+=1
