"""A few calls of decode from 8 threads on 8 streams, each compared to the bit with the same call made alone; no jax."""
import os, random, sys, threading, time
import torch
import tsmla_bridge
from tsmla_bridge import Workspace, decode_workspace_size

name, calls = sys.argv[1], int(os.environ.get("TSMLA_STRESS_CALLS", "2"))
QD, KD = {"bf16": (torch.bfloat16,) * 2, "fp8": (torch.float8_e4m3fn,) * 2, "mixed": (torch.bfloat16, torch.float8_e4m3fn)}[name]
begin = time.time()

def arrays(batch, q_len, heads, pages, seed):
    g = torch.Generator().manual_seed(seed)
    cache = torch.randn(batch * pages + 1, 64, 576, generator=g) / 3
    tables = torch.randperm(batch * pages, generator=g).view(batch, pages).to(torch.int32)
    lens = torch.randint(0, pages * 64 + 1, (batch,), generator=g, dtype=torch.int32)
    lens[0] = pages * 64
    q = torch.randn(batch, q_len, heads, 576, generator=g)
    return q.to(QD).cuda(), cache.to(KD).cuda(), tables.cuda(), lens.cuda()

def attend(args, **options):
    return tsmla_bridge.mla_decode(*args, softmax_scale=192**-0.5, return_lse=True, **options)

shapes = [(2, 1, 16, 4), (3, 2, 16, 3), (2, 1, 128, 3)]
inputs = [arrays(*s, i) for i, s in enumerate(shapes)]
wants = [attend(x) for x in inputs]
torch.cuda.synchronize()
print(name, "wants at", round(time.time() - begin, 1), flush=True)
failures, done = [], []

def work(seed):
    rng, stream = random.Random(seed), torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            dtypes = {"dtype": QD, "kv_dtype": KD}
            size = max(decode_workspace_size(num_heads=h, max_batch=3, max_q_len=2, **dtypes) for h in (16, 128))
            workspace = Workspace(size)
            for _ in range(calls):
                i = rng.randrange(len(inputs))
                got = attend(inputs[i], **({"workspace": workspace} if rng.random() < 0.5 else {}))
                stream.synchronize()
                for a, b in zip(got, wants[i], strict=True):
                    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), (seed, i)
                done.append(i)
    except BaseException as error:
        failures.append(error)

threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print(name, "calls", len(done), "failures", failures[:3], "end at", round(time.time() - begin, 1), flush=True)
sys.exit(bool(failures) or len(done) != 8 * calls)
