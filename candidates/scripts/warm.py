import os, subprocess, sys
CH='''
import sys, os, time, traceback
import jax, jax.numpy as jnp
said=[]
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == "cutlass" and not said:
            frames=[f"{f.filename.split('/')[-1]}:{f.lineno} {f.name}" for f in traceback.extract_stack() if "importlib" not in f.filename and "jax/_src" not in f.filename]
            said.append(frames[-9:])
            if any("compile.py" in f for f in frames): said.append("COMPILE")
            else: said.clear() if any("find_spec" in f and "cache" in f for f in frames[-2:]) else None
        return None
sys.meta_path.insert(0, Hook())
jax.block_until_ready(jnp.zeros(8)+1)
b,m=3,5
a=(jnp.ones((b,1,16,576),jnp.bfloat16), jnp.ones((b*m+1,64,576),jnp.bfloat16), jnp.arange(b*m,dtype=jnp.int32).reshape(b,m), jnp.full((b,),9,jnp.int32))
jax.block_until_ready(a)
t=time.perf_counter()
import tsmla_jax
t1=time.perf_counter()
f=jax.jit(lambda *a: tsmla_jax.mla_decode(*a, softmax_scale=192**-0.5, implementation="cute"))
jax.block_until_ready(f(*a)); print("import %.2f first %.2f"%(t1-t,time.perf_counter()-t), "cutlass" in sys.modules, os.listdir(os.environ["TSMLA_CACHE_DIR"]))
print(said)
'''
for i in range(2):
    r=subprocess.run([sys.executable,"-c",CH],env=dict(os.environ,TSMLA_CACHE_DIR="/tmp/warmcache"),capture_output=True,text=True); print("run",i); print(r.stdout[-1800:], r.stderr[-600:] if r.returncode else "")
