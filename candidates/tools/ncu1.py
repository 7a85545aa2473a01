import sys; sys.path.insert(0,'.gpu'); import dev,torch
b,s,h,keys=map(int,sys.argv[2].split(',')); v=sys.argv[1]
import os
C=dev.Case(s,h,sys.argv[3],[keys]*b,nan=False); run=C.runner(v)
for _ in range(3): run()
torch.cuda.synchronize()
