import re,sys
name,a,b=sys.argv[1],int(sys.argv[2]),int(sys.argv[3])
s=open(f'/work/notes/sass/{name}.sass').read(); i=s.index('.text.kernel_cutlass_attend'); L=s[i:].splitlines()
out=[]
for l in L:
    m=re.search(r'/\*([0-9a-f]{4,})\*/\s+(.*?);',l)
    if m: out.append((m.group(1),m.group(2)))
    elif re.match(r'\.L_x',l): out.append(('----',l))
for n,(x,y) in enumerate(out[a:b]): print(a+n,x,y[:86])
