"""srcview.py FILE [min samples]: the hot loops with stalls by instruction"""
import csv,sys
rows=list(csv.reader(open(sys.argv[1])))
h=rows[1]; data=[r for r in rows[2:] if len(r)>10]
ix={n:i for i,n in enumerate(h)}
st=[n for n in h if n.startswith("stall_") and "(" not in n]
tot=sum(int(r[ix["# Samples"]]) for r in data)
blocks={}
print("total samples",tot)
mx=int(sys.argv[2]) if len(sys.argv)>2 else 40
lo,hi=(int(sys.argv[3]),int(sys.argv[4])) if len(sys.argv)>4 else (0,10**9)
for i,r in enumerate(data):
    n=int(r[ix["# Samples"]])
    if lo<=i<hi and (n>=mx):
        s=sorted(((int(r[ix[k]] or 0),k[6:]) for k in st),reverse=True)[:3]
        print(i,r[ix["Source"]].strip()[:70].ljust(70),n,"x"+r[ix["Instructions Executed"]]," ".join(f"{k}:{v}" for v,k in s if v))
