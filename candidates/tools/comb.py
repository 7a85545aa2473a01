import re,sys
s=open(f'/work/notes/sass/{sys.argv[1]}.sass').read()
i=s.index('.text.kernel_cutlass_combine'); j=s.find('.text.kernel_cutlass_attend')
seg=s[i:j] if j>i else s[i:]
out=[]
for l in seg.splitlines():
    m=re.search(r'/\*([0-9a-f]{4,})\*/\s+(.*?);',l)
    if m: out.append(m.group(2))
    elif re.match(r'\.L_x',l): out.append(l)
print(len(out))
run=0
for n,y in enumerate(out):
    if re.search(r'LDG|BAR|STG|SHFL.*0x1f|BRA|EXIT|ACQ|MUFU|LDS|STS',y) and 'SHFL' not in y: print(n,f'(+{run})',y[:70]); run=0
    else: run+=1
