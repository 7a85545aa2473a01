"""What parts of an eager mla_decode cost on this host: the launches by other ways, and torch's calls one by one."""
import ctypes, functools, json, os, statistics, sys, time
import torch
import tsmla_bridge
from tsmla_bridge import decode, devices, scales
from tsmla_kernels import launch

B, H, P, Z = 4, 16, 4, 64
q = torch.randn(B, 1, H, 576).bfloat16().cuda()
cache = torch.randn(B * P, Z, 576).bfloat16().cuda()
tables = torch.arange(B * P, dtype=torch.int32, device="cuda").view(B, P)
lens = torch.full((B,), P * Z, dtype=torch.int32, device="cuda")
sc = 192**-0.5
def ours(**o): return tsmla_bridge.mla_decode(q, cache, tables, lens, softmax_scale=sc, **o)
ref = ours(); torch.cuda.synchronize()
opts = (512, None, True, False, None)
plan = decode.plan_for(q, cache, tables, lens, None, opts)
out, lse = torch.empty_like(ref), torch.empty(B, 1, H, device="cuda")
there = torch.tensor([sc, 1.0], device="cuda")
memory = torch.empty(plan.size, dtype=torch.uint8, device="cuda")
base = memory.data_ptr()
addresses = [t.data_ptr() for t in (q, cache, tables, lens, lens, there, out, lse)] + [base + o for o in plan.offsets]
from tsmla_bridge import kernels
from tsmla_kernels.sm90 import choose
(launcher,) = kernels._loaded.values()
spaces = choose.workspace_shapes(choose.decode_config(plan.spec), devices.num_sms(0), B, P)
shapes = [(B * H, 576), (B * P, Z, 576), (B, P), (B,), (B,), (2,), (B * H, 512), (B * H,), *(s for s, _ in spaces.values())]
count = len(addresses)
sizes = [(ctypes.c_int64 * len(s))(*s) for s in shapes]
block = launch._Arguments(sizes, launcher._run)
handle, pointers = (x.value for x in block.run.args[:2])
block.words[launch.FIRST_DESCRIPTOR:launch.FIRST_DESCRIPTOR + 2 * count:2] = addresses
import re, subprocess
from tsmla_kernels import cache as objects
from tsmla_kernels.catalog import MLA_DECODE
here = os.path.dirname(os.path.abspath(__file__))
module = objects.load_or_compile(MLA_DECODE, choose.decode_config(plan.spec), devices.arch(0)).module
open("/tmp/obj.o", "wb").write(module)
names = subprocess.run(["nm", "/tmp/obj.o"], capture_output=True, text=True, check=True).stdout
entry = re.search(r" T (_mlir_cutlass_call__mlir_ciface\S*)", names).group(1)
open("/tmp/m.c", "w").write(open(here + "/micro.c").read().replace('"ENTRY"', f'"{entry}"'))
subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-I/usr/local/cuda/include", "-o", "/tmp/micro.so", "/tmp/m.c", "/tmp/obj.o", "-ldl"], check=True)
lib = ctypes.CDLL("/tmp/micro.so")
print("setup", lib.setup())
lib.bench.restype = ctypes.c_long
lib.bench.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
runtime = launch._runtime()
run_at = ctypes.cast(runtime.CuteDSLRT_Function_Run, ctypes.c_void_p).value
rows = []
side = torch.cuda.Stream()
def bench(name, through, mode=0, only=-1, stream=0, calls=50, rounds=40):
    block.words[0] = stream
    ns = lib.bench(run_at if through else None, handle, pointers, count + 2, mode, only, calls, rounds, stream)
    torch.cuda.synchronize()
    same = torch.equal(out, ref)
    rows.append((name, ns / 1e3)); print(f"{name:58s} {ns/1e3:7.2f} us   {'same' if same else 'other bits'} error {block.words[1]}")
is_like, _ = decode._latest[opts]
shape = plan.new_out
def borrowed():
    devices.give_back(devices.borrow(plan.size, 0))
launch_of_plan = plan.launch
cases = {
    "mla_decode": ours,
    "mla_decode, lse": lambda: ours(return_lse=True),
    "plan.launch": lambda: launch_of_plan(0, addresses),
    "nothing": lambda: None,
    "is_like": lambda: is_like(q, cache, tables, lens),
    "is_compiling": torch.compiler.is_compiling,
    "plan_of_latest": lambda: decode.plan_of_latest(q, cache, tables, lens, None, opts),
    "current_device": devices.current_device,
    "current_stream": lambda: devices.current_stream(0),
    "is_capturing": devices.is_capturing,
    "new out": lambda: devices.new_tensor(*shape),
    "borrow, give back": borrowed,
    "data_ptr": q.data_ptr,
    "scales.on_device": lambda: scales.on_device((sc, 1.0), 0, 0),
}
CALLS = 50
times = {k: [] for k in cases}
for r in range(41):
    for k, f in cases.items():
        b = time.perf_counter_ns()
        for _ in range(CALLS): f()
        t = (time.perf_counter_ns() - b) / CALLS / 1e3
        torch.cuda.synchronize()
        if r: times[k].append(t)
for k, t in times.items():
    rows.append((k, statistics.median(t))); print(f"{k:40s} {statistics.median(t):7.2f} us, least {min(t):.2f}")
json.dump(rows, open(os.environ.get("OUT", ".") + "/bridge_micro.json", "w"))
for turn in range(2):
    for name, stream in (("default stream", 0), ("side stream", side.cuda_stream)):
        bench(f"{name}: the DSL's runtime", True, stream=stream)
        bench(f"{name}: driver, CUkernel", False, 0, stream=stream)
        bench(f"{name}: driver, CUfunction", False, 1, stream=stream)
        bench(f"{name}: + no cooperative attribute", False, 3, stream=stream)
        bench(f"{name}: + no cluster attribute", False, 7, stream=stream)
        bench(f"{name}: + no PDL=0 attribute", False, 15, stream=stream)
        bench(f"{name}: + no PDL at all", False, 31, stream=stream)
        bench(f"{name}: + cuLaunchKernel", False, 63, stream=stream)
        bench(f"{name}: attend alone, CUkernel", False, 0, 0, stream=stream)
        bench(f"{name}: attend alone, least attributes", False, 15, 0, stream=stream)
        bench(f"{name}: combine alone (PDL)", False, 15, 1, stream=stream)
        bench(f"{name}: combine alone, no PDL", False, 31, 1, stream=stream)
        bench(f"{name}: nothing launched", False, 31, 5, stream=stream)

json.dump(rows, open(os.environ.get("OUT", ".") + "/bridge_micro.json", "w"))
