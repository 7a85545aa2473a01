"""trace.py VARIANT b,s,h,keys MODE: where the cycles of a block go (variants tr16, tr16h: the tree's, tr8)."""
import statistics, sys
sys.path.insert(0, ".gpu")
import dev, torch
v, point, mode = sys.argv[1:4]
b, s, h, keys = map(int, point.split(","))
dev.make(v); dev.compile_all([v], [dev.opts(s, h, mode)])
C = dev.Case(s, h, mode, [keys] * b, nan=False); run = C.runner(v)
for _ in range(3): run()
torch.cuda.synchronize()
sc = run.keep[9].flatten()[:400].cpu().view(50, 8); pv = run.keep[8].flatten()[400:1200].cpu().view(2, 50, 8)
base = sc[4, 0].item(); d = lambda x: int(x - base) if x == x else None
for i in range(4, 20):
    print(i, "score", [d(sc[i, j].item()) for j in range(2)], "values", [d(pv[0, i, j].item()) for j in range(2)], [d(pv[1, i, j].item()) for j in range(1)])
n = min(38, keys // (64 if mode == "q8" else 32) - 2)
print("period", statistics.mean((sc[i + 1, 0] - sc[i, 0]).item() for i in range(5, n)), [statistics.mean((sc[i, j + 1] - sc[i, j]).item() for i in range(5, n)) for j in range(1)],
      "values", [statistics.mean((pv[1, i, j + 1] - pv[1, i, j]).item() for i in range(5, n)) for j in range(1)])
