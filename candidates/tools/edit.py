"""edit.py FILE: python list of (old,new[,count]) from stdin; all or nothing"""
import sys
p=sys.argv[1]; s=open(p).read()
for e in eval(sys.stdin.read()):
    a,b=e[:2]; n=e[2] if len(e)>2 else 1
    if s.count(a)!=n: sys.exit(f"found {s.count(a)} of {n}: {a}")
    s=s.replace(a,b)
open(p,'w').write(s)
