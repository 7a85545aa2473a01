import csv,sys
rows=list(csv.reader(open(sys.argv[1]))); h=rows[1]; data=[r for r in rows[2:] if len(r)>10]; ix={n:i for i,n in enumerate(h)}
st=[n for n in h if n.startswith("stall_") and "(" not in n]
def seg(lo,hi,name,per=None,cyc=None):
    n=sum(int(r[ix["# Samples"]]) for r in data[lo:hi]); d={k[6:]:sum(int(r[ix[k]] or 0) for r in data[lo:hi]) for k in st}
    print(f"{name:28s} {lo}-{hi} ins {hi-lo} samples {n}", f"= {n/per*cyc:.0f} cycles" if per else "", {k:round(v/per*cyc) if per else v for k,v in sorted(d.items(),key=lambda x:-x[1])[:7] if v})
    return n
if __name__=="__main__":
    for s in sys.argv[2:]:
        lo,hi,name=s.split(":"); seg(int(lo),int(hi),name)
